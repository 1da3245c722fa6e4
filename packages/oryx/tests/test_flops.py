"""Test the FLOPs model of appendix E: its parts, its simplified form and its crossover."""

import pytest

from tokenmix_oryx.flops import crossover, mixer_flops


def test_parts_are_those_of_the_derivation():
    T, K, V, C = 4096, 64, 128, 256
    flops = mixer_flops(T, 0.25, key_size=K, value_size=V, chunk_size=C)
    chunks = T // C
    # chunk states K_iᵀ V_i, and one multiply-add of a state for each chunk
    assert flops.state == chunks * 2 * C * K * V + chunks * 2 * K * V
    within, across = 2 * C * C * K + 2 * C * C * V, 2 * C * K * V
    assert flops.linear_output == 0.75 * chunks * (within + across)
    assert flops.attention_output == 0.25 * sum(2 * (t + 1) * (K + V) for t in range(T))
    assert flops.total == flops.state + flops.linear_output + flops.attention_output


def test_the_ends_are_the_two_mixers():
    assert mixer_flops(2048, 0.0).attention_output == 0
    assert mixer_flops(2048, 1.0).linear_output == 0
    # attention alone: T (T + 1) (K + V)
    assert mixer_flops(2048, 1.0).attention_output == 2048 * 2049 * 256


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
def test_the_simplified_form_holds_for_long_sequences(share):
    T, C = 32768, 128
    simple = 2 * T * C**2 * (1 + 3 * (1 - share)) + 2 * share * T**2 * C
    assert mixer_flops(T, share).total == pytest.approx(simple, rel=0.01)


def test_the_paper_s_crossover():
    assert crossover(0.25) == pytest.approx(555, abs=1)
    for T, fewer in ((512, False), (640, True), (2048, True)):
        simple = 2 * T * 128**2 * (1 + 3 * 0.75) + 2 * 0.25 * T**2 * 128
        assert (simple < 2 * T**2 * 128) is fewer
        assert (mixer_flops(T, 0.25).total < mixer_flops(T, 1.0).attention_output) is fewer


def test_wrong_shares_and_sizes_are_told():
    for call in (lambda: mixer_flops(8, 1.5), lambda: mixer_flops(0, 0.5), lambda: crossover(1.0)):
        with pytest.raises(ValueError, match="attention_share"):
            call()
