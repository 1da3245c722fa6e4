from tokenmix_core.testing.benchmarking import mixed_lengths


def test_mixed_lengths_fill_the_tokens_and_differ():
    lengths = mixed_lengths(65536)
    assert lengths.sum() == 65536
    assert len(lengths) == 32
    assert lengths.min() >= 128
    assert lengths.max() > 16 * lengths.min()
