"""Decoding step of SSD: cp.async loads the state, which keeps more bytes in flight than loads to registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon.hopper import LOG2_E, async_copy, async_load, gdc_launch_and_wait, state_layout
from tokenmix_core.kernels.launch.launcher import cached_launch


@cached_launch
@gluon.jit(do_not_specialize=["G", "HV"])
def hopper_step_kernel(
    q, k, v, g, dt, D, o, state, slots, stride_q, stride_k, stride_v, stride_state, scale, G, HV,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, BK: gl.constexpr,
    PDL: gl.constexpr = False,
):  # fmt: skip
    """Update BV columns of a head's state and compute their o per program, BK rows at a time as their copies arrive."""
    gdc_launch_and_wait(PDL)
    layout: gl.constexpr = state_layout(BK, BV, gl.num_warps())
    i_v, i_nh = gl.program_id(0) % (V // BV) * BV, gl.program_id(0) // (V // BV)
    i_n, i_h = (i_nh // HV).to(gl.int64), i_nh % HV
    i_nh = i_nh.to(gl.int64)
    o_k, o_v = gl.arange(0, BK, gl.SliceLayout(1, layout)), gl.arange(0, BV, gl.SliceLayout(0, layout))
    if slots is not None:
        i_slot = gl.load(slots + i_n).to(gl.int64)
        if i_slot < 0:
            gl.store(o + i_nh * V + i_v + o_v, gl.zeros([BV], o.dtype.element_ty, gl.SliceLayout(0, layout)))
            return
        p_s = state + i_slot * stride_state + i_h * (K * V) + i_v
    else:
        p_s = state + i_nh * (K * V) + i_v
    p_s = p_s + o_k[:, None] * V + o_v[None, :]
    s_s = gl.allocate_shared_memory(state.dtype.element_ty, [K // BK, BK, BV], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for i in gl.static_range(K // BK):
        async_load(s_s.index(i), p_s + i * BK * V)
        async_copy.commit_group()

    q += i_n * stride_q + i_h // (HV // G) * K + o_k
    k += i_n * stride_k + i_h // (HV // G) * K + o_k
    b_v = gl.load(v + i_n * stride_v + i_h * V + i_v + o_v).to(gl.float32)
    decay = gl.exp2(gl.load(g + i_nh).to(gl.float32) * LOG2_E)
    b_x = b_v
    if dt is not None:
        b_x = b_v * gl.load(dt + i_nh).to(gl.float32)
    parts_q, parts_k = (), ()
    for i in gl.static_range(K // BK):
        parts_q += (gl.load(q + i * BK),)
        parts_k += (gl.load(k + i * BK),)

    b_o = gl.zeros([BK, BV], gl.float32, layout)
    for i in gl.static_range(K // BK):
        async_copy.wait_group(K // BK - 1 - i)
        b_s = s_s.index(i).load(layout).to(gl.float32) * decay + parts_k[i].to(gl.float32)[:, None] * b_x[None, :]
        gl.store(p_s + i * BK * V, b_s.to(state.dtype.element_ty))
        b_o += b_s * parts_q[i].to(gl.float32)[:, None]
    b_o = gl.sum(b_o, 0) * scale
    if D is not None:
        b_o += b_v * gl.load(D + i_h).to(gl.float32)
    gl.store(o + i_nh * V + i_v + o_v, b_o.to(o.dtype.element_ty))
