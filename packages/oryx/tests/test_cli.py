"""Test that the command line sets modes, and that results name them."""

import json

import pytest
import torch

from tokenmix_core.data.tokenizer import byte_tokenizer
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.modeling.cache_name import CACHE
from tokenmix_oryx.cli import main
from tokenmix_oryx.config import OryxConfig
from tokenmix_oryx.model import OryxForCausalLM

SIZES = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}


def saved(model, folder):
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    torch.manual_seed(0)
    options = {"oryx": {"head_dim": 16}}
    config = OryxConfig(**SIZES, mixer_options=options, mode_chunk_size=16, initializer_range=0.2)
    return saved(OryxForCausalLM(config), tmp_path_factory.mktemp("oryx"))


@pytest.fixture
def calls(monkeypatch):
    """Return a list to which each call of the backbone appends a tuple.

    The tuple has the mode (one, or for each token True for attention), the number of tokens, and whether the call's
    cache has promised linear mode.
    """
    seen = []
    prepare = OryxForCausalLM.model_class.prepare_mixer_inputs

    def watch(self, inputs, span, cu_seqlens, cache):
        out = prepare(self, inputs, span, cu_seqlens, cache)
        modes = out["mode"]
        attends = None if modes.attention is None else span.unpack(modes.attention).tolist()
        seen.append((modes.uniform or attends, span.tokens, cache is not None and cache.linear_only))
        return out

    monkeypatch.setattr(OryxForCausalLM.model_class, "prepare_mixer_inputs", watch)
    return seen


def generate(checkpoint, capsys, *flags):
    argv = ["generate", checkpoint, "--prompt", "def main(", "--max-new-tokens", "4", "--temperature", "0", *flags]
    code = main(argv)
    return code, capsys.readouterr()


@pytest.mark.parametrize(
    ("flags", "modes"),
    [
        ((), ("attention", "attention", False)),
        (("--prefill-mode", "linear"), ("linear", "linear", False)),
        (("--generation-mode", "linear"), ("attention", "linear", False)),
        (("--prefill-mode", "linear", "--generation-mode", "attention"), ("linear", "attention", False)),
        (("--prefill-mode", "linear", "--no-keep-kv"), ("linear", "linear", True)),
        (("--no-keep-kv",), ("attention", "linear", True)),
        (("--prefill-mode", "0:linear,4:attention"), ([[t >= 4 for t in range(9)]], "attention", False)),
        (("--prefill-mode", "0.0:attention,0.5:linear"), ([[t < 5 for t in range(9)]], "linear", False)),
    ],
)
def test_generate_uses_the_modes_of_the_command(checkpoint, capsys, calls, flags, modes):
    code, _ = generate(checkpoint, capsys, *flags)
    assert code == 0
    prompt, *steps = calls
    assert prompt[:2] == (modes[0], 9)
    # the cache promises linear mode before a prompt in linear mode, else after the prompt
    assert prompt[2] == (modes[2] and modes[0] == "linear")
    assert steps
    assert all(step == (modes[1], 1, modes[2]) for step in steps)


def test_generation_switches_by_its_schedule(checkpoint, capsys, calls):
    assert (
        generate(checkpoint, capsys, "--prefill-mode", "linear", "--generation-mode", "0:linear,10:attention")[0] == 0
    )
    assert [mode for mode, *_ in calls] == ["linear", "linear", "attention", "attention"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--prefill-mode", "quick"), "a mode must be 'linear' or 'attention', got 'quick'"),
        (("--prefill-mode", "a:linear"), "expected linear, attention or a schedule such as 0:linear,1000:attention"),
        (("--prefill-mode", "4:linear"), "the starts of a schedule must increase from 0, got [4]"),
        (("--generation-mode", "0.0:linear,0.5:attention"), "the starts of generation_mode must be positions"),
        (("--generation-mode", "attention", "--no-keep-kv"), "keep_kv=False promises linear mode to the end"),
    ],
)
def test_invalid_mode_gives_one_sentence(checkpoint, capsys, flags, said):
    code, streams = generate(checkpoint, capsys, *flags)
    assert (code, streams.out) == (2, "")
    assert "Traceback" not in streams.err
    *_, last = streams.err.splitlines()
    assert last.startswith("tokenmix-oryx generate: error: ")
    assert said in last


def test_modes_of_a_model_without_modes_are_refused(tmp_path, capsys):
    options = {"attention": {"num_heads": 2}}
    folder = saved(HybridForCausalLM(HybridConfig(**SIZES, mixers=["attention"], mixer_options=options)), tmp_path)
    code, streams = generate(folder, capsys, "--prefill-mode", "linear")
    assert code == 2
    assert "got one of type 'tokenmix_hybrid'" in streams.err.splitlines()[-1]
    assert generate(folder, capsys)[0] == 0


def results(folder, suite):
    return json.loads((folder / f"{suite}.json").read_text())


def test_bench_uses_and_names_the_modes_of_the_command(checkpoint, tmp_path, capsys, calls):
    argv = ["bench", checkpoint, "--lengths", "32", "--repeats", "1", "--out", str(tmp_path)]
    assert main([*argv, "--prefill-mode", "linear", "--generation-mode", "attention"]) == 0
    for suite in ("training", "efficiency"):
        result = results(tmp_path, suite)
        assert result["settings"]["modes"] == "linear → attention"
        assert [row["modes"] for row in result["rows"]] == ["linear → attention"]
    assert {mode for mode, tokens, _ in calls if tokens == 32} == {"linear"}
    assert {mode for mode, tokens, _ in calls if tokens == 1} == {"attention"}
    assert "linear → attention" in (tmp_path / "report.md").read_text()
    assert "| linear → attention |" in capsys.readouterr().out


@pytest.mark.parametrize("prefill", ["linear", "attention"])
def test_cache_size_without_keys_and_values_is_constant(checkpoint, tmp_path, prefill):
    argv = ["eval", checkpoint, "--suite", "efficiency", "--lengths", "32,96", "--limit", "1", "--out", str(tmp_path)]
    assert main([*argv, "--prefill-mode", prefill, "--no-keep-kv"]) == 0
    dropped = results(tmp_path, "efficiency")
    assert dropped["settings"]["keys and values"] == "not kept"
    held = [row["cache bytes"] for row in dropped["rows"]]
    model = OryxForCausalLM.from_pretrained(checkpoint)
    assert held == [model.state_bytes(length, linear_only=True) for length in (32, 96)]
    assert held[0] == held[1]
    assert main([*argv, "--prefill-mode", prefill]) == 0
    kept = [row["cache bytes"] for row in results(tmp_path, "efficiency")["rows"]]
    # the KV cache allocates spare slots
    assert all(2 * model.state_bytes(n) > size >= model.state_bytes(n) for size, n in zip(kept, (32, 96), strict=True))


def test_suites_of_core_name_their_mode(checkpoint, tmp_path, calls):
    argv = ["eval", checkpoint, "--suite", "perplexity-by-position", "--lengths", "64", "--limit", "2"]
    found = {}
    for mode in ("linear", "attention"):
        calls.clear()
        assert main([*argv, "--prefill-mode", mode, "--out", str(tmp_path / mode)]) == 0
        assert {m for m, *_ in calls} == {mode}
        result = results(tmp_path / mode, "perplexity-by-position")
        assert result["settings"]["modes"] == mode
        assert {row["modes"] for row in result["rows"]} == {mode}
        found[mode] = result["rows"][0]
    assert found["linear"] != {**found["attention"], "modes": "linear"}
    # without a flag, the mode is the checkpoint's
    assert main([*argv, "--out", str(tmp_path / "own")]) == 0
    own = results(tmp_path / "own", "perplexity-by-position")
    assert own["rows"] == results(tmp_path / "attention", "perplexity-by-position")["rows"]


def test_suite_that_sets_modes_refuses_mode_options(checkpoint, tmp_path, capsys):
    argv = ["eval", checkpoint, "--suite", "isolated-mqar", "--out", str(tmp_path), "--prefill-mode", "linear"]
    assert main(argv) == 2
    assert "suite isolated-mqar sets the modes itself" in capsys.readouterr().err
    assert main([*argv[:-2], "--lengths", "64", "--limit", "1"]) == 0
    result = results(tmp_path, "isolated-mqar")
    assert result["settings"]["modes"] == "each row's"
    assert {row["modes"] for row in result["rows"]} == {"linear", "attention"}


@pytest.mark.skipif(CACHE != "cache", reason="the engine before transformers 5.24 has another interface")
def test_requests_to_a_server_choose_their_mode(checkpoint):
    client_of = pytest.importorskip("fastapi.testclient").TestClient
    from tokenmix_core.serving import Engine, build_app

    model, tokenizer = OryxForCausalLM.from_pretrained(checkpoint).eval(), byte_tokenizer()
    prompt = tokenizer("def main(")["input_ids"]
    with client_of(build_app(Engine(model), tokenizer, "tiny")) as client:

        def ask(**body):
            asked = {"prompt": prompt, "max_tokens": 6, "temperature": 0, **body}
            return client.post("/v1/completions", json=asked).json()

        for mode in ("linear", "attention", [(0, "linear"), (11, "attention")]):
            out = model.generate(torch.tensor([prompt]), mode=mode, max_new_tokens=6, do_sample=False, pad_token_id=0)
            text = tokenizer.decode(out[0, len(prompt) :], skip_special_tokens=True)
            assert ask(mode=mode)["choices"][0]["text"] == text
            if isinstance(mode, str):
                assert ask(model=f"tiny:{mode}")["choices"][0]["text"] == text
        for body in (
            {"mode": "fast"},
            {"model": "tiny:fast"},
            {"mode": {}},
            {"mode": "linear", "model": "tiny:linear"},
        ):
            assert ask(**body)["error"]["code"] == 400
            assert "mode" in ask(**body)["error"]["message"]
