"""Decoding step of one token: cp.async loads the state, which keeps more bytes in flight than loads to registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tokenmix_core.kernels.gluon.hopper import LOG2_E, async_copy, async_load, gdc_launch_and_wait, state_layout
from tokenmix_core.kernels.launch.launcher import cached_launch


@gluon.jit
def add_both(a, b, c, d):
    """Return (a + c, b + d), to compute two sums in one reduction."""
    return a + c, b + d


@cached_launch
@gluon.jit(do_not_specialize=["H", "group"])
def hopper_step_kernel(
    q, k, v, g, beta, o, state, slots, stride_state, scale, H, group,
    K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, BK: gl.constexpr, L2NORM: gl.constexpr,
    PDL: gl.constexpr = False,
):  # fmt: skip
    """Update BV columns of a head's state S per program, BK rows at a time: compute Sᵀ k and Sᵀ q, then update S."""
    gdc_launch_and_wait(PDL)
    layout: gl.constexpr = state_layout(BK, BV, gl.num_warps())
    i_v, i_nh = gl.program_id(0) % (V // BV) * BV, gl.program_id(0) // (V // BV)
    i_n, i_hv = i_nh // (H * group), i_nh % (H * group)
    i_nh, i_h = i_nh.to(gl.int64), (i_n * H + i_hv // group).to(gl.int64)
    o_k, o_v = gl.arange(0, BK, gl.SliceLayout(1, layout)), gl.arange(0, BV, gl.SliceLayout(0, layout))
    if slots is not None:
        i_slot = gl.load(slots + i_n).to(gl.int64)
        if i_slot < 0:
            gl.store(o + i_nh * V + i_v + o_v, gl.zeros([BV], o.dtype.element_ty, gl.SliceLayout(0, layout)))
            return
        state += i_slot * stride_state + i_hv * (K * V) + i_v
    else:
        state += i_nh * (K * V) + i_v
    s_s = gl.allocate_shared_memory(state.dtype.element_ty, [K, BV], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    whole: gl.constexpr = state_layout(K, BV, gl.num_warps())
    w_k, w_v = gl.arange(0, K, gl.SliceLayout(1, whole)), gl.arange(0, BV, gl.SliceLayout(0, whole))
    async_load(s_s, state + w_k[:, None] * V + w_v[None, :])
    async_copy.commit_group()

    q += i_h * K
    k += i_h * K
    b_v = gl.load(v + i_nh * V + i_v + o_v).to(gl.float32)
    decay, beta_t = gl.exp2(gl.load(g + i_nh).to(gl.float32) * LOG2_E), gl.load(beta + i_nh).to(gl.float32)
    # each warp loads all of q and k, so that sums over K need no barrier
    o_l = gl.arange(0, K, gl.BlockedLayout([K // 32], [32], [gl.num_warps()], [0]))
    l_q, l_k = gl.load(q + o_l).to(gl.float32), gl.load(k + o_l).to(gl.float32)
    kq = gl.sum(l_k * l_q, 0)
    r_q, r_k = scale, 1.0
    if L2NORM:
        r_q = scale * gl.rsqrt(gl.sum(l_q * l_q, 0) + 1e-6)
        r_k = gl.rsqrt(gl.sum(l_k * l_k, 0) + 1e-6)
    parts_q, parts_k = (), ()
    for i in gl.static_range(K // BK):
        parts_q += (gl.load(q + i * BK + o_k),)
        parts_k += (gl.load(k + i * BK + o_k),)

    async_copy.wait_group(0)
    b_sq, b_sk = gl.zeros([BK, BV], gl.float32, layout), gl.zeros([BK, BV], gl.float32, layout)
    for i in gl.static_range(K // BK):
        b_s = s_s.slice(i * BK, BK, dim=0).load(layout).to(gl.float32)
        b_sq += b_s * parts_q[i].to(gl.float32)[:, None]
        b_sk += b_s * parts_k[i].to(gl.float32)[:, None]
    # reduce Sᵀ k and Sᵀ q of the old state S together; the update k uᵀ (u: `b_u`) then adds (k · q) u to the output
    b_sq, b_sk = gl.reduce((b_sq, b_sk), 0, add_both)
    b_u = (b_v - decay * r_k * b_sk) * (beta_t * r_k)
    b_o = r_q * (decay * b_sq + kq * b_u)
    gl.store(o + i_nh * V + i_v + o_v, b_o.to(o.dtype.element_ty))
    p_s = state + o_k[:, None] * V + o_v[None, :]
    for i in gl.static_range(K // BK):
        b_s = s_s.slice(i * BK, BK, dim=0).load(layout).to(gl.float32)
        p_i = p_s + i * BK * V
        b_s = b_s * decay + parts_k[i].to(gl.float32)[:, None] * b_u[None, :]
        gl.store(p_i, b_s.to(state.dtype.element_ty))
