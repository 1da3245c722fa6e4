"""The kernel of a Gated DeltaNet decoding step, and its launcher: direct if eager, a torch custom op if traced."""

# ruff would ask for starred elements in tuples, which Triton cannot compile
# ruff: noqa: RUF005

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokenmix_core.chunking import next_power_of_2
from tokenmix_core.kernels.launch.launcher import cached_launch
from tokenmix_core.kernels.triton.activations import sigmoid
from tokenmix_core.ops.autograd import cached_op, direct_when_eager, of_fields
from tokenmix_core.ops.fused.gdn_gates_kernels import softplus
from tokenmix_core.ops.gated_delta_rule import tuning
from tokenmix_core.ops.slots import slot_stride

# fields of `Inputs` that a call overwrites
WRITTEN = ("q_inputs", "k_inputs", "v_inputs", "state", "arrivals")


class Inputs(NamedTuple):
    """The arguments of `delta_layer_step`."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    gate: Tensor | None
    q_weight: Tensor
    k_weight: Tensor
    v_weight: Tensor
    q_inputs: Tensor
    k_inputs: Tensor
    v_inputs: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    state: Tensor
    arrivals: Tensor
    scale: float
    max_beta: float
    eps: float
    slots: Tensor | None = None

    def readable(self) -> "Inputs":
        """Return the arguments in a layout that the kernel reads: each token's elements contiguous; copy if needed."""
        q, k, v, gate = (None if x is None else _rows(x) for x in (self.q, self.k, self.v, self.gate))
        a, b = (x if x.stride(1) == 1 else x.contiguous() for x in (self.a, self.b))
        names = "q_weight", "k_weight", "v_weight", "A_log", "dt_bias", "norm_weight", "slots"
        contiguous = {name: None if (x := getattr(self, name)) is None else x.contiguous() for name in names}
        return self._replace(q=q, k=k, v=v, gate=gate, a=a, b=b, **contiguous)


def _rows(x: Tensor) -> Tensor:
    """Return x `[B, H, D]` itself if each token's `[H, D]` elements are contiguous, else a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.clone(memory_format=torch.contiguous_format)


@triton.jit
def convolve(x, weight, inputs, i_n, i_r, o_d, m_d, stride_x, D, W: tl.constexpr):
    """Return the SiLU of the convolution at token `i_n`, for the channels `o_d`, in float32.

    Row `i_r` of `inputs` has the W − 1 inputs before the token; it is not overwritten here. Channels outside of the
    mask `m_d` get 0.
    """
    p_x = inputs + (i_r * D + o_d) * (W - 1)
    b_z = tl.zeros(o_d.shape, tl.float32)
    for w in tl.static_range(W - 1):
        b_x = tl.load(p_x + w, mask=m_d, other=0.0).to(tl.float32)
        b_z += b_x * tl.load(weight + o_d * W + w, mask=m_d, other=0.0).to(tl.float32)
    b_x = tl.load(x + i_n * stride_x + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_z += b_x * tl.load(weight + o_d * W + W - 1, mask=m_d, other=0.0).to(tl.float32)
    return b_z * sigmoid(b_z)


@triton.jit
def shift_inputs(x, inputs, i_n, i_r, o_d, m_d, stride_x, D, W: tl.constexpr):
    """Drop the oldest input in row `i_r` of `inputs`, append token `i_n`'s; a barrier separates loads and stores."""
    p_x = inputs + (i_r * D + o_d) * (W - 1)
    b_x = ()
    for w in tl.static_range(W - 2):
        b_x = b_x + (tl.load(p_x + w + 1, mask=m_d, other=0.0),)
    b_x = b_x + (tl.load(x + i_n * stride_x + o_d, mask=m_d, other=0.0),)
    tl.debug_barrier()
    for w in tl.static_range(W - 1):
        tl.store(p_x + w, b_x[w], mask=m_d)


@cached_launch
@triton.jit
def delta_layer_step_kernel(
    q, k, v, a, b, gate, q_weight, k_weight, v_weight, q_inputs, k_inputs, v_inputs, A_log, dt_bias, norm_weight,
    state, arrivals, slots, o, y, stride_q, stride_k, stride_v, stride_a, stride_b, stride_gate, stride_q_inputs,
    stride_k_inputs, stride_v_inputs, stride_state, stride_arrivals, scale, max_beta, eps, H, group, parts,
    HEAD_K: tl.constexpr, HEAD_V: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BD: tl.constexpr,
    W: tl.constexpr, PDL: tl.constexpr = False,
):  # fmt: skip
    """Update BV columns of a head of the state, and shift the inputs of the same columns of v, per program.

    The program of a key head that arrives last also writes y of all its value heads, and shifts the inputs of q and k.
    HEAD_K and HEAD_V are the sizes of the heads of q, k and v; K and V those of the heads of the state, of which
    `parts` hold the columns of one value head.
    """
    if PDL:
        gdc_launch_dependents()
    tiles = group * parts * (V // BV)
    i_t, i_nh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    i_n, i_h = (i_nh // H).to(tl.int64), i_nh % H
    HV = H * group
    i_s = i_h * group * parts + i_t // (V // BV)
    i_hv = i_s // parts
    o_k, o_c = tl.arange(0, K), i_t % (V // BV) * BV + tl.arange(0, BV)
    # index of the state's row; with slots, pointers are moved to the row's slot instead
    i_r = i_n
    if slots is not None:
        i_slot = tl.load(slots + i_n).to(tl.int64)
        if i_slot < 0:
            if PDL:
                gdc_wait()
            o_y = i_s % parts * V + o_c
            b_y = tl.zeros([BV], y.dtype.element_ty)
            tl.store(y + (i_n * HV + i_hv) * HEAD_V + o_y, b_y, mask=o_y < HEAD_V)
            return
        q_inputs += i_slot * stride_q_inputs
        k_inputs += i_slot * stride_k_inputs
        v_inputs += i_slot * stride_v_inputs
        state += i_slot * stride_state
        arrivals += i_slot * stride_arrivals
        i_r = tl.cast(0, tl.int64)
    p_s = state + (i_r * HV * parts + i_s) * (K * V) + o_k[:, None] * V + o_c[None, :]
    # the loads of slots and state may precede gdc_wait, because no other kernel of a decoding step writes these
    b_s = tl.load(p_s).to(tl.float32)
    if PDL:
        gdc_wait()

    m_k, o_k = o_k < HEAD_K, i_h * HEAD_K + o_k
    o_v = i_s % parts * V + o_c
    m_v, o_v = o_v < HEAD_V, i_hv * HEAD_V + o_v
    b_q = convolve(q, q_weight, q_inputs, i_n, i_r, o_k, m_k, stride_q, H * HEAD_K, W)
    b_k = convolve(k, k_weight, k_inputs, i_n, i_r, o_k, m_k, stride_k, H * HEAD_K, W)
    b_v = convolve(v, v_weight, v_inputs, i_n, i_r, o_v, m_v, stride_v, HV * HEAD_V, W)
    rate = softplus(tl.load(a + i_n * stride_a + i_hv).to(tl.float32) + tl.load(dt_bias + i_hv).to(tl.float32))
    decay = tl.exp(-tl.exp(tl.load(A_log + i_hv).to(tl.float32)) * rate)
    beta = max_beta * sigmoid(tl.load(b + i_n * stride_b + i_hv).to(tl.float32))
    r_q = scale * tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6)
    r_k = tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
    # one sweep over the old state S gives Sᵀ k and Sᵀ q; the update k uᵀ (u: `b_u`) then adds (k · q) u to the output
    b_sk, b_sq = tl.sum(b_s * b_k[:, None], 0), tl.sum(b_s * b_q[:, None], 0)
    b_u = (b_v - decay * r_k * b_sk) * (beta * r_k)
    b_o = r_q * (decay * b_sq + tl.sum(b_k * b_q, 0) * b_u)
    tl.store(p_s, b_s * decay + b_k[:, None] * b_u[None, :])
    tl.store(o + i_n * HV * HEAD_V + o_v, b_o, mask=m_v)
    # v's inputs may be shifted here, because no other program reads these channels
    shift_inputs(v, v_inputs, i_n, i_r, o_v, m_v, stride_v, HV * HEAD_V, W)

    # this barrier lets the whole program's loads and stores precede its arrival at the counter, so that the last
    # program to arrive sees the stores of all others
    tl.debug_barrier()
    if tl.atomic_add(arrivals + i_r * H + i_h, 1, sem="acq_rel", scope="gpu") == tiles - 1:
        tl.store(arrivals + i_r * H + i_h, 0)
        shift_inputs(q, q_inputs, i_n, i_r, o_k, m_k, stride_q, H * HEAD_K, W)
        shift_inputs(k, k_inputs, i_n, i_r, o_k, m_k, stride_k, H * HEAD_K, W)
        o_d = tl.arange(0, BD)
        m_d = o_d < HEAD_V
        b_w = tl.load(norm_weight + o_d, mask=m_d, other=0.0).to(tl.float32)
        for i in range(group):
            o_y = (i_h * group + i) * HEAD_V + o_d
            b_y = tl.load(o + i_n * HV * HEAD_V + o_y, mask=m_d, other=0.0, cache_modifier=".cg")
            b_y *= tl.rsqrt(tl.sum(b_y * b_y, 0) / HEAD_V + eps) * b_w
            if gate is not None:
                b_z = tl.load(gate + i_n * stride_gate + o_y, mask=m_d, other=0.0).to(tl.float32)
                b_y *= b_z * sigmoid(b_z)
            tl.store(y + i_n * HV * HEAD_V + o_y, b_y.to(y.dtype.element_ty), mask=m_d)


@of_fields
def _step(x: Inputs) -> Tensor:
    """Return y `[B, HV, V]`; overwrite the convolutions' inputs and the state; `arrivals` is zero again at the end."""
    x = x.readable()
    B, H, head_k = x.q.shape
    HV, head_v = x.v.shape[1:]
    heads, K, V = x.state.shape[1:]
    tile = tuning.scan_tile("step", K, V, x.q.element_size(), B * heads)
    o = torch.empty((B, HV, head_v), dtype=torch.float32, device=x.v.device)
    y = torch.empty((B, HV, head_v), dtype=x.v.dtype, device=x.v.device)
    rows = dict(q=x.q, k=x.k, v=x.v, a=x.a, b=x.b, gate=x.gate)
    strides = {f"stride_{name}": 0 if t is None else t.stride(0) for name, t in rows.items()}
    strides |= {f"stride_{name}": slot_stride(x.slots, getattr(x, name)) for name in WRITTEN}
    delta_layer_step_kernel[(B * heads * (V // tile.BV),)](
        **x._asdict(), o=o, y=y, **strides, H=H, group=HV // H, parts=heads // HV, HEAD_K=head_k, HEAD_V=head_v,
        K=K, V=V, BV=tile.BV, BD=next_power_of_2(head_v), W=x.q_weight.shape[1], num_warps=tile.num_warps,
    )  # fmt: skip
    return y


delta_layer_step_op = cached_op(
    "tokenmix_core::delta_layer_step", _step, lambda x: x.v.new_empty(x.v.shape), mutates_args=WRITTEN
)
step = direct_when_eager(delta_layer_step_op, _step, writes=Inputs._fields.index("state"))
