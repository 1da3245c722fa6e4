"""The share of the slots equals the paper's equation and is plotted."""

import pytest
import torch

from tokenmix_core.data.synthetic import mqar
from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_core.evaluation.recall import MQAR_HELD_OUT
from tokenmix_core.evaluation.report import write_result
from tokenmix_core.testing.closeness import relative_error
from tokenmix_nha.evals import observed_shares, recall_share_suite, share_suite, slot_shares
from tokenmix_nha.model import NhaConfig, NhaForCausalLM
from tokenmix_nha.model_windows import nha_mixers
from tokenmix_nha.windows import nha_layers


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    fields = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 32}
    layers = nha_layers([4, "full", 0], num_heads=2, slots=4)
    config = NhaConfig(**fields, **layers, initializer_range=0.2)
    return NhaForCausalLM(config).eval()


def test_shares_are_means_over_sequences_of_the_layers_shares(model):
    ids = torch.randint(0, 264, (5, 24))
    shares = slot_shares(model, ids, batch_size=2)
    assert shares.shape == (3, 2, 24)
    with observed_shares(nha_mixers(model)) as seen, torch.no_grad():
        for row in ids:
            model(row[None], use_cache=False)
    for layer in range(3):
        exact = torch.cat(seen[layer]).double().mean(0).T
        assert relative_error(shares[layer], exact) < 1e-5
    # without a window the slots' share is 1; slots of a full layer stay zero, and their share falls with each new key
    assert (shares[2] == 1).all()
    assert (shares[1, :, 0] > shares[1, :, -1]).all()
    assert nha_mixers(model)[0].shares is None


def test_the_suite_reports_and_plots_the_share_by_layer_head_and_position(model, tmp_path):
    result = share_suite(model, byte_tokenizer(), EvalOptions(lengths=(128,), limit=2, progress=False))
    assert [row["window"] for row in result["rows"]] == [4, "full", 0]
    heads, positions = result["plots"][1]["heatmap"], result["plots"][2]["heatmap"]
    assert (len(heads), len(heads[0])) == (3, 2)
    assert (len(positions), len(positions[0])) == (3, 64)
    for row, by_head, by_position in zip(result["rows"], heads, positions, strict=True):
        assert abs(sum(by_head) / 2 - row["slots' share"]) < 1e-9
        assert abs(sum(by_position) / 64 - row["slots' share"]) < 1e-9
        assert min(by_head) == row["lowest head"] <= row["highest head"] == max(by_head)
    names = {path.name for path in write_result(result, tmp_path)}
    assert {"slot-share-1.png", "slot-share-2.png", "slot-share-3.png"} <= names


def test_the_recall_suite_uses_the_most_pairs_a_sequence_can_hold(model):
    options = EvalOptions(lengths=(64,), limit=3, progress=False)
    result = recall_share_suite(model, byte_tokenizer(), options)
    assert result["settings"] == {"length": 64, "sequences": 3, "pairs": 16, "vocab_size": 264}
    rows = mqar(3, seq_len=64, num_pairs=16, vocab_size=264, seed=0, first=MQAR_HELD_OUT)
    shares = slot_shares(model, rows.input_ids)
    assert result["plots"][1]["heatmap"] == shares.mean(2).tolist()
