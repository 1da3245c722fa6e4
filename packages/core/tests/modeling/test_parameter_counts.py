"""The baselines have the sizes that the papers state."""

import pytest
import torch

from tokenmix_core.modeling import HybridForCausalLM
from tokenmix_core.modeling.baselines import BASELINES, baseline


def parameters(name):
    with torch.device("meta"):
        return HybridForCausalLM(baseline(name)).num_parameters()


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        # nats_l section 5: 21, 48, 24 and 17 + 5 layers of width 1536
        ("nats_l/gated_delta_net-800m", 793e6),
        ("nats_l/mamba2-800m", 801e6),
        ("nats_l/transformer-800m", 778e6),
        ("nats_l/gated_delta_net_hybrid-800m", 802e6),
        ("nats_l/gated_delta_net-380m", 380e6),
        ("nats_l/mamba2-380m", 380e6),
        # nha table 1
        *((f"nha/{kind}-{size}", stated) for size, stated in (("340m", 340e6), ("1.3b", 1300e6))
          for kind in ("transformer", "gated_delta_net", "gated_delta_net_hybrid", "mamba2_hybrid")),
        # oryx table 9: "parameter-matched"
        *((f"oryx/{kind}-{size}", stated)
          for size, stated in (("130m", 130e6), ("380m", 380e6), ("810m", 810e6), ("1.4b", 1410e6))
          for kind in ("transformer", "mamba2", "gated_delta_net")),
    ],
)  # fmt: skip
def test_counts_are_within_a_percent_of_what_the_paper_states(name, stated):
    assert abs(parameters(name) - stated) <= 0.01 * stated


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        # a size that names a whole family, by its last digit
        ("nats_l/transformer-380m", 370e6, 390e6),
        ("nats_l/gated_delta_net_hybrid-380m", 370e6, 390e6),
        ("lte/transformer-0.4b", 0.34e9, 0.45e9),
        ("lte/gated_delta_net-0.4b", 0.35e9, 0.45e9),
        ("lte/gated_delta_net_attention-0.4b", 0.35e9, 0.45e9),
        ("lte/gated_delta_net_window-0.4b", 0.35e9, 0.45e9),
        # lte appendix A gives one width, depth and head count to all, so its models lie around 1.4b
        ("lte/gated_delta_net_attention-1.4b", 1.25e9, 1.45e9),
        ("lte/gated_delta_net_window-1.4b", 1.25e9, 1.45e9),
        ("lte/transformer-1.4b", 1.15e9, 1.45e9),
        ("lte/gated_delta_net-1.4b", 1.35e9, 1.55e9),
    ],
)
def test_counts_round_to_the_name_of_the_size(name, least, most):
    assert least <= parameters(name) < most


def test_every_baseline_is_counted():
    rows = [
        *test_counts_are_within_a_percent_of_what_the_paper_states.pytestmark[0].args[1],
        *test_counts_round_to_the_name_of_the_size.pytestmark[0].args[1],
    ]
    assert {row[0] for row in rows} == set(BASELINES)


def rest(width, layers, vocab, tied):
    """Embeddings, output layer, and the norms of the blocks and the end."""
    return vocab * width * (1 if tied else 2) + (2 * layers + 1) * width


def delta(width, heads, key, value):
    projections = width * heads * (2 * key + 3 * value) + 2 * width * heads
    return projections + 4 * heads * (2 * key + value) + 2 * heads + value


def mamba(width, state=128, head=64):
    inner, heads = 2 * width, 2 * width // head
    mixed = inner + 2 * state
    return width * (inner + mixed + heads) + inner * width + (4 + 1) * mixed + 3 * heads + inner


def test_counts_follow_from_the_equations():
    d, mlp = 1536, 3 * 1536 * 4096
    assert parameters("nats_l/gated_delta_net-800m") == rest(d, 21, 32000, False) + 21 * (delta(d, 6, 192, 384) + mlp)
    assert parameters("nats_l/transformer-800m") == rest(d, 24, 32000, False) + 24 * (4 * d * d + mlp)
    # a block without an MLP has one norm
    assert parameters("nats_l/mamba2-800m") == rest(d, 48, 32000, False) - 48 * d + 48 * mamba(d)
    assert parameters("nats_l/gated_delta_net_hybrid-800m") == (
        rest(d, 22, 32000, False) + 22 * mlp + 17 * delta(d, 6, 192, 384) + 5 * 4 * d * d
    )
    d = 2048
    assert parameters("lte/gated_delta_net_attention-1.4b") == (
        rest(d, 24, 32000, False) + 24 * 3 * d * 5632 + 12 * delta(d, 8, 256, 256) + 12 * d * (2 * 2048 + 2 * 512)
    )
    assert parameters("oryx/mamba2-1.4b") == rest(d, 24, 50257, True) + 24 * (mamba(d) + 3 * d * 4672)


def test_layouts_are_those_of_the_papers():
    mixers = baseline("nats_l/gated_delta_net_hybrid-800m").mixers
    assert (len(mixers), mixers.count("attention")) == (22, 5)
    # nha section 4.1: the seventh layer of every eight, the first at the larger size
    for size, place in (("340m", 6), ("1.3b", 0)):
        mixers = baseline(f"nha/gated_delta_net_hybrid-{size}").mixers
        assert [i for i, m in enumerate(mixers) if m == "attention"] == [place, 8 + place, 16 + place]
    # oryx section 4: twice ORYX's state for Mamba-2, half as much again for Gated DeltaNet
    oryx = 16 * 128 * 128 * 4 * 24
    with torch.device("meta"):
        models = {k: HybridForCausalLM(baseline(f"oryx/{k}-1.4b")).model for k in ("mamba2", "gated_delta_net")}
    for kind, ratio in (("mamba2", 2), ("gated_delta_net", 1.5)):
        state = sum(m.make_state().recurrent.bounds(1, 1, torch.bfloat16).most for m in models[kind].mixers)
        assert state == ratio * oryx


def test_an_unknown_baseline_is_named():
    with pytest.raises(ValueError, match="'gpt-5'"):
        baseline("gpt-5")
