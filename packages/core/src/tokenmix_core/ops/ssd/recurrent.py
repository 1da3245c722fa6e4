"""SSD token by token, with columns of the state in a program's registers: for decoding and short sequences."""

from collections import namedtuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.pdl import gdc_launch_and_wait
from tokenmix_core.kernels.triton.varlen import sequence_span
from tokenmix_core.ops.decode_tiles import StateStep
from tokenmix_core.ops.slots import slot_stride
from tokenmix_core.ops.ssd import tuning
from tokenmix_core.ops.ssd.types import Inputs

# pointers to a head's elements of token 0; dt and D may be None
Pointers = namedtuple("Pointers", "q k v g dt D o")


@triton.jit
def scan_token(b_s, p, t, strides, scale, HV, V: tl.constexpr):
    """Store the output of token t and return the state after it; `strides` are the token strides of q, k and v."""
    b_q, b_k = tl.load(p.q + t * strides[0]).to(tl.float32), tl.load(p.k + t * strides[1]).to(tl.float32)
    b_v = tl.load(p.v + t * strides[2]).to(tl.float32)
    b_x = b_v
    if p.dt is not None:
        b_x = b_v * tl.load(p.dt + t * HV).to(tl.float32)
    b_s = b_s * tl.exp(tl.load(p.g + t * HV).to(tl.float32)) + b_k[:, None] * b_x[None, :]
    b_o = tl.sum(b_s * b_q[:, None], 0) * scale
    if p.D is not None:
        b_o += b_v * tl.load(p.D).to(tl.float32)
    tl.store(p.o + t * HV * V, b_o.to(p.o.dtype.element_ty))
    return b_s


@cached_launch
@triton.jit(do_not_specialize=["T", "G", "HV"])
def ssd_recurrent_kernel(
    q, k, v, g, dt, D, o, initial_state, final_state, cu_seqlens, slots,
    stride_q, stride_k, stride_v, stride_state, scale, T, G, HV,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PACKED: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Scan one sequence, head and tile of V per program.

    STEP: each sequence has one token, and the kernel has no loop, which would cost registers; it may have `slots`.
    """
    gdc_launch_and_wait(PDL)
    i_p = tl.program_id(0)
    i_v = i_p % (V // BV)
    i_h = i_p // (V // BV) % HV
    i_n = i_p // (V // BV) // HV
    bos, length = sequence_span(i_n, T, cu_seqlens, PACKED)
    i_g = i_h // (HV // G)
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    o_state = (i_n.to(tl.int64) * HV + i_h) * K * V
    if slots is not None:
        i_slot = tl.load(slots + i_n).to(tl.int64)
        if i_slot < 0:
            tl.store(o + (bos * HV + i_h) * V + o_v, tl.zeros([BV], o.dtype.element_ty))
            return
        o_state = i_slot * stride_state + i_h * (K * V)
    o_state = o_state + o_k[:, None] * V + o_v[None, :]
    b_s = tl.zeros([K, BV], tl.float32)
    if initial_state is not None:
        b_s += tl.load(initial_state + o_state)
    q += i_g * K + o_k
    k += i_g * K + o_k
    v += i_h * V + o_v
    o += i_h * V + o_v
    g += i_h
    if dt is not None:
        dt += i_h
    if D is not None:
        D += i_h
    pointers, strides = Pointers(q, k, v, g, dt, D, o), (stride_q, stride_k, stride_v)
    if STEP:
        b_s = scan_token(b_s, pointers, bos, strides, scale, HV, V)
    else:
        for i_t in range(length):
            b_s = scan_token(b_s, pointers, bos + i_t, strides, scale, HV, V)
    tl.store(final_state + o_state, b_s)


def ssd_recurrent(x: Inputs, final_state: Tensor, tile: StateStep | None = None, slots: Tensor | None = None) -> Tensor:
    """Return outputs; write the final states to `final_state [N, HV, K, V]`, which may be the initial state's tensor.

    With `tile` a Gluon kernel computes a single token and overwrites its state, `final_state`. With `slots`, for single
    tokens, the states of the sequences are these slots of `final_state`.
    """
    T, G, K = x.q.shape[1:]
    HV, V = x.v.shape[2:]
    N = len(final_state) if slots is None else len(slots)
    o = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    arguments = dict(
        q=x.q, k=x.k, v=x.v, g=x.g, dt=x.dt, D=x.D, o=o, stride_q=x.q.stride(1), stride_k=x.k.stride(1),
        stride_v=x.v.stride(1), slots=None if slots is None else slots.contiguous(),
        stride_state=slot_stride(slots, final_state), scale=x.scale, G=G, HV=HV, K=K, V=V,
    )  # fmt: skip
    if tile is not None:
        from tokenmix_core.ops.ssd.hopper.step import hopper_step_kernel

        hopper_step_kernel[(N * HV * (V // tile.BV),)](
            **arguments, state=final_state, BV=tile.BV, BK=tile.BK, num_warps=tile.num_warps
        )
        return o
    step = T == 1 and x.cu_seqlens is None
    config = tuning.step_tile(N * HV, K, V) if step else tuning.recurrent_tile(N * HV, K, V)
    ssd_recurrent_kernel[(N * HV * (V // config.BV),)](
        **arguments, initial_state=x.initial_state, final_state=final_state, cu_seqlens=x.cu_seqlens, T=T,
        BV=config.BV, PACKED=x.cu_seqlens is not None, STEP=step, num_warps=config.num_warps,
    )  # fmt: skip
    return o
