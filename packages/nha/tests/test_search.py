"""The search tries the patterns of Table 5, finds the best candidate, and writes a configuration that loads."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_nha.cli import main
from tokenmix_nha.model import NhaConfig, NhaForCausalLM
from tokenmix_nha.model_windows import windows_of
from tokenmix_nha.search import best_of_each, remembered, score_of, search_windows
from tokenmix_nha.windows import nha_layers

LAYERS = 12


def make(layers=LAYERS, windows=4, **options):
    sizes = {"vocab_size": 264, "hidden_size": 16, "num_hidden_layers": layers, "intermediate_size": 16}
    torch.manual_seed(0)
    return NhaForCausalLM(NhaConfig(**sizes, **nha_layers(windows, num_heads=2, slots=4, **options))).eval()


@pytest.fixture(scope="module")
def model():
    return make(windows=[4, "full"])


WORTH = {5: 3.0, 10: 2.0, 1: 1.0}


def worth(model):
    """Return a score to which some full layers add much and each other full layer a small negative amount."""
    return sum(WORTH.get(i, -0.01) for i, window in enumerate(windows_of(model)) if window == "full")


def test_all_patterns_positions_and_insertions_are_tried_and_the_best_is_found(model):
    found, chosen = search_windows(model, worth, window=4, blocks=(6, 3, 2), insert=1, progress=False)
    patterns = [c.pattern for c in found]
    counts = {p: patterns.count(p) for p in dict.fromkeys(patterns)}
    assert counts == {"pure linear": 1, "1:6": 6, "1:3": 3, "1:2": 2, "1:6 + 1": LAYERS - 2, "all full": 1}
    best = {c.pattern: c for c in best_of_each(found)}
    assert best["pure linear"].full == []
    assert (best["1:6"].position, best["1:6"].full) == (5, [5, 11])
    # the insertion adds the layer with the highest score
    assert best["1:6 + 1"].full == [5, 10, 11]
    assert chosen == best["1:6 + 1"]
    assert best["1:2"].full == [1, 3, 5, 7, 9, 11]
    assert best["all full"].full == list(range(LAYERS))
    for candidate in found:
        assert abs(candidate.score - sum(WORTH.get(i, -0.01) for i in candidate.full)) < 1e-9
    assert windows_of(model) == [4, "full"] * 6


def test_the_selected_candidate_respects_max_full(model):
    options = {"window": 4, "blocks": (6, 3), "progress": False}
    assert search_windows(model, worth, max_full=2, **options)[1].full == [5, 11]
    assert search_windows(model, worth, max_full=0, **options)[1].full == []
    # insertions are chosen one after the other: layer 10 first, then layer 1
    assert search_windows(model, worth, insert=2, **options)[1].full == [1, 5, 10, 11]
    # of candidates with equal scores, the one with the fewest full layers is selected
    assert search_windows(model, lambda m: 1.0, **options)[1].full == []
    calls = []
    search_windows(model, lambda m: calls.append(tuple(windows_of(m))) or 0.0, **options)
    assert len(calls) == len(set(calls))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"blocks": (13,)}, "blocks must have from 2"),
        ({"blocks": ()}, "blocks must have from 2"),
        ({"insert": -1}, "insert must be"),
        ({"max_full": -1}, "max_full must be"),
        ({"window": -1}, "a window must be"),
    ],
)
def test_invalid_options_are_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        search_windows(model, worth, **{"window": 4, "blocks": (6,), "progress": False, **options})


def test_rows_of_any_suite_give_a_score():
    def score(rows):
        return score_of("task", {"suite": "s", "settings": {}, "rows": rows, "plots": []})

    assert score([{"accuracy": 0.5, "loss": 9.0}, {"accuracy": 1.0, "loss": 9.0}]) == 0.75
    average = [{"task": "average", "metric": "2 tasks", "value": 9.0}]
    recall = [{"task": "fda", "metric": "contains", "value": 0.2}, {"task": "swde", "metric": "contains", "value": 0.4}]
    assert abs(score(recall + average) - 0.3) < 1e-12
    lengths = [{"task": "niah_single_1", "metric": n, "value": v} for n, v in (("1024", 1.0), ("2048", 0.5))]
    assert score([*lengths, {"task": "average", "metric": "1024", "value": 9.0}]) == 0.75
    whole = {"task": "longbench_trec_e", "metric": "score", "value": 0.3}
    assert score([whole, whole | {"metric": "score, 0k-4k words", "value": 9.0}]) == 0.3
    part = {"predictor": "model", "position": "1-64", "loss": 5.0}
    beside = {"predictor": "bigram", "position": "all", "loss": 1.0}
    assert score([part, {"predictor": "model", "position": "all", "loss": 2.0}, beside]) == -2.0
    with pytest.raises(ValueError, match="gives no accuracy"):
        score([{"prompt": "a", "continuation": "b"}])


def test_a_resumed_search_does_not_repeat_saved_scores(model, tmp_path):
    log, asked = tmp_path / "out" / "tried.jsonl", []

    def stops(m):
        asked.append(tuple(windows_of(m)))
        if len(asked) == 4:
            raise KeyboardInterrupt
        return worth(m)

    options, about = {"window": 4, "blocks": (6, 3), "progress": False}, {"task": "a", "lengths": (64,)}
    with pytest.raises(KeyboardInterrupt):
        search_windows(model, remembered(stops, log, about, resume=False), **options)
    # a killed process leaves an unfinished line
    with log.open("a") as file:
        file.write('{"windows": [4')
    before = asked[:3]
    found, chosen = search_windows(model, remembered(stops, log, about, resume=True), **options)
    assert (found, chosen) == search_windows(model, worth, **options)
    assert not set(before) & set(asked[4:])
    count = len(asked)
    search_windows(model, remembered(stops, log, about, resume=True), **options)
    assert len(asked) == count
    # saved scores of another task are not used, and without `resume` none are
    for others, resume in (({"task": "b"}, True), (about, False)):
        asked.clear()
        search_windows(model, remembered(lambda m: asked.append(1) or 0.0, log, others, resume=resume), **options)
        assert len(asked) > count - 4


def test_the_command_writes_table_plot_and_a_configuration_that_loads(tmp_path, capsys):
    model = make(layers=4, windows=[4, 4, "full", 4])
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    call = ["search", str(tmp_path / "model"), "--task", "mqar:mqar-64-4", "--lengths", "64", "--limit", "4"]
    assert main([*call, "--vocab-size", "200", "--max-full", "1"]) == 0
    assert main([*call, "--vocab-size", "200", "--max-full", "1", "--resume"]) == 0
    out = tmp_path / "model" / "search"
    assert {"search.json", "search.png", "report.md", "chosen"} <= {path.name for path in out.iterdir()}
    result = json.loads((out / "search.json").read_text())
    assert [row["pattern"] for row in result["rows"]] == ["pure linear", "1:4", "1:3", "1:2", "1:4 + 1", "all full"]
    config = AutoConfig.from_pretrained(out / "chosen")
    full = json.loads(result["settings"]["chosen"])["full layers"]
    chosen = [config.options_of(i)["window"] for i in range(4)]
    assert chosen == ["full" if i in full else 4 for i in range(4)]
    assert len(full) <= 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", config=config)
    assert windows_of(again) == chosen
    assert "chosen: full layers" in capsys.readouterr().out
    for wrong, message in (
        ([*call[:3], "nothing"], "there is no suite 'nothing'"),
        ([*call, "--window", "-2"], "a window must be"),
        ([*call, "--blocks", "5,2"], "blocks must have from 2 to the model's 4 layers, got [5, 2]"),
        ([*call[:3], "mqar:none", "--lengths", "64"], "has no task 'none'"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err
