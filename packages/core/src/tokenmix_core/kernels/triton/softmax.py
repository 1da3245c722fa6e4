"""Online softmax over KV tiles, with base-2 exponentials."""

import triton
import triton.language as tl


@triton.jit
def online_softmax(b_s, b_m, b_l, scale, MASKED: tl.constexpr):
    """Update the running row maximum `b_m` and row sum `b_l` by a tile of scores `b_s [BM, BN]`.

    `scale` > 0 turns scores into base-2 exponents; `b_m` is unscaled, so that scaling and subtraction are one
    instruction. Masked scores are −∞; `MASKED` allows rows in which all scores are masked.

    Returns:
        the unnormalised probabilities, the factor that rescales older sums, `b_m`, `b_l`.
    """
    b_new = tl.maximum(b_m, tl.max(b_s, 1))
    b_top = tl.where(b_new == float("-inf"), 0.0, b_new) if MASKED else b_new
    b_p = tl.exp2(b_s * scale - (b_top * scale)[:, None])
    # subtract before scaling: if the maximum does not change, a fused multiply-add would give 1 plus a rounding error
    b_shrink = tl.exp2((b_m - b_top) * scale)
    return b_p, b_shrink, b_new, b_l * b_shrink + tl.sum(b_p, 1)


@triton.jit
def finish_softmax(b_m, b_l, scale):
    """Return the accumulator's normalising factor, and the natural log-sum-exp; if a row sees no key, 0 and −∞."""
    ln2: tl.constexpr = 0.6931471805599453
    m_l = b_l > 0
    b_l = tl.where(m_l, b_l, 1.0)
    return tl.where(m_l, 1.0 / b_l, 0.0), tl.where(m_l, (b_m * scale + tl.log2(b_l)) * ln2, float("-inf"))
