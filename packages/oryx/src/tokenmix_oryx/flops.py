"""FLOPs of the sequence mixers in the forward pass of one head, counting only matmuls (appendix E)."""

from __future__ import annotations

from typing import NamedTuple


class MixerFlops(NamedTuple):
    """FLOPs of the forward pass of an Oryx mixer over a sequence, by part.

    Attributes:
        state: updates of the linear state, by all tokens.
        linear_output: outputs of the tokens in linear mode.
        attention_output: attention of the tokens in attention mode to all earlier tokens.
    """

    state: float
    linear_output: float
    attention_output: float

    @property
    def total(self) -> float:
        """Sum of all parts."""
        return sum(self)


def mixer_flops(
    seq_len: int, attention_share: float, *, key_size: int = 128, value_size: int = 128, chunk_size: int = 128
) -> MixerFlops:
    """Return the FLOPs of one head over T tokens, of which an evenly spaced fraction 1 − δ is in attention mode:

        2 T K V (1 + 1/C) + δ (2 T C (K + V) + 2 T K V) + (1 − δ) T (T + 1) (K + V)

    The state takes 2 T K V, and 2 T K V / C for the scan over chunks of C tokens; linear outputs take 2 T C (K + V) in
    chunks and 2 T K V to read chunk states; attention takes scores and weighted values of T (T + 1) / 2 pairs.

    Args:
        seq_len: T.
        attention_share: 1 − δ.
        key_size: K.
        value_size: V.
        chunk_size: C.

    Raises:
        ValueError: a share outside 0 … 1, or sizes below 1.
    """
    if not 0 <= attention_share <= 1 or min(seq_len, key_size, value_size, chunk_size) < 1:
        raise ValueError(
            "mixer_flops: attention_share must be from 0 to 1 and sizes at least 1, got "
            f"{attention_share}, T={seq_len}, K={key_size}, V={value_size}, C={chunk_size}"
        )
    state, sizes = 2.0 * seq_len * key_size * value_size, key_size + value_size
    return MixerFlops(
        state * (1 + 1 / chunk_size),
        (1 - attention_share) * (2.0 * seq_len * chunk_size * sizes + state),
        attention_share * float(seq_len * (seq_len + 1) * sizes),
    )


def crossover(attention_share: float, chunk_size: int = 128) -> float:
    """Return the approximate length above which mixed modes need fewer FLOPs than attention: (1/δ + 3) C.

    δ is 1 − `attention_share`, C is `chunk_size`, and head sizes are K = V = C.
    """
    if not 0 <= attention_share < 1:
        raise ValueError(f"crossover: attention_share must be from 0 to below 1, got {attention_share}")
    return (1 / (1 - attention_share) + 3) * chunk_size
