"""Test that commands do what they say, with their own recipes and suites, and describe errors in one sentence."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import torch

import tokenmix_core
from tokenmix_core.cli.app import main

COMMANDS = ["train", "eval", "generate", "bench", "push", "data prepare", "info", "convert"]


@pytest.fixture
def recipes(token_file):
    """Return one recipe of two layers and four steps."""

    def nano():
        from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens

        options = {"gated_delta_net": {"num_heads": 1, "head_dim": 16}, "attention": {"num_heads": 2}}
        sizes = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        batch = Tokens(128)
        return Recipe(
            name="nano",
            description="two layers for tests",
            model={**sizes, "mixers": ["gated_delta_net", "attention"], "mixer_options": options},
            data=DataRecipe(sources=[token_file], seq_len=32),
            optimizer=OptimizerRecipe(total_tokens=Tokens(512), batch_tokens=batch, micro_batch_tokens=batch),
            run=RunRecipe(
                logging_steps=1,
                evaluations=["perplexity-by-position", "mqar"],
                evaluation_lengths=[32],
                evaluation_limit=2,
                sample_prompt="word1",
            ),
        )

    return {"nano": nano}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example_of_the_calling_program(command, capsys):
    assert main([*command.split(), "--help"], prog="tokenmix-paper") == 0
    assert f"example: tokenmix-paper {command} " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["eval", "train"])
def test_help_imports_nothing_heavy(command):
    code = (
        f"import sys; from tokenmix_core.cli import main; main(['{command}', '--help']);"
        "print([m for m in ('torch', 'transformers', 'numpy', 'triton') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.splitlines()[-1] == "[]"


def test_info_imports_torch_but_no_models():
    code = (
        "import sys; from tokenmix_core.cli import main; assert main(['info']) == 0;"
        "print([m for m in ('transformers', 'triton', 'accelerate', 'datasets') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert out.stdout.splitlines()[-1] == "[]"


def test_version_names_core_and_the_package(tmp_path, monkeypatch, capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tokenmix-core {tokenmix_core.__version__}\n"
    (tmp_path / "versioned_paper.py").write_text("__version__ = '7.8'\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--version"], recipes="versioned_paper:RECIPES") == 0
    assert capsys.readouterr().out == f"tokenmix-core {tokenmix_core.__version__}, versioned-paper 7.8\n"


@pytest.mark.parametrize(("given", "kept"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_sleep_at_barriers_unless_the_user_chose_otherwise(given, kept):
    # the code ends at the import of torch, which reads the policy
    code = """if True:
        import os, sys

        class AtTorch:
            def find_spec(name, *_):
                if name == "torch":
                    print(os.environ["OMP_WAIT_POLICY"], flush=True)
                    os._exit(0)

        from tokenmix_core.cli import main

        sys.meta_path.insert(0, AtTorch)
        main(["info", "tiny"])
        sys.exit("torch was imported before, or never")
    """
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240, env=environment)
    assert out.stdout.splitlines()[-1] == kept


def test_train_leaves_a_model_its_tables_and_its_plots(recipes, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out = tmp_path / "run"
    assert main(["train", "nano", "--out", str(out), "--learning_rate", "1e-3"], recipes=recipes) == 0
    found = {p.name for p in (out / "evaluation").iterdir()}
    assert found == {
        *("report.md", "training.json", "training.png", "samples.json", "mqar.json", "mqar.png"),
        *("perplexity-by-position.json", "perplexity-by-position.png"),
    }
    rows = json.loads((out / "evaluation" / "perplexity-by-position.json").read_text())["rows"]
    assert [row["predictor"] for row in rows] == ["model", "model", "bigram"]
    manifest = json.loads((out / "run.json").read_text())
    assert manifest["values"]["learning_rate"] == 1e-3
    # each result names its model, software and text; the text evaluated on is the held-out part of the trained one
    for path in (out / "evaluation").glob("*.json"):
        origin = json.loads(path.read_text())["provenance"]
        assert origin["checkpoint"] == str(out)
        assert origin["commit"] == manifest["commit"]
        assert {"dtype", "device", "seed", "limit", "lengths", "python", "versions"} <= origin.keys()
        if path.stem in ("samples", "perplexity-by-position"):
            assert manifest["identity"]["data"]["tokens-0"].startswith(origin["corpus"]["sha256"])
        elif path.stem == "training":
            assert origin["corpus"]["fingerprints"] == manifest["identity"]["data"]
    samples = json.loads((out / "evaluation" / "samples.json").read_text())["rows"]
    assert [row["prompt"] for row in samples] == ["word1"]
    assert "trained 4 steps" in capsys.readouterr().out
    assert main(["generate", str(out), "--prompt", "word", "--max-new-tokens", "2"], recipes=recipes) == 0
    # the folder is in use now and must not change
    before = sorted(p.stat().st_mtime_ns for p in out.rglob("*"))
    assert main(["train", "nano", "--out", str(out)], recipes=recipes) == 2
    assert f"{out} is not empty" in capsys.readouterr().err
    assert before == sorted(p.stat().st_mtime_ns for p in out.rglob("*"))


def test_the_command_that_ctrl_c_leaves_goes_on_with_the_fields_that_were_given(token_file, tmp_path):
    out = tmp_path / "a run"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "tokenmix"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tokenmix_core.cli "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    fields = ["--sources", token_file, "--seq_len", "32", "--batch_tokens", "64", "--micro_batch_tokens", "64"]
    fields += ["--total_tokens", "1M", "--learning_rate", "1e-3", "--logging_steps", "1", "--save_steps", "100000"]
    fields += ["--model.num_hidden_layers", "1", "--model.mixers", "[attention]"]
    fields += ["--model.mixer_options", "{attention: {num_heads: 2}}"]
    log = out / "metrics.jsonl"

    def logged():
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return [json.loads(line)["step"] for line in lines if '"loss"' in line and line.endswith("\n")]

    def interrupted_after(step, command):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as run:
            end = time.monotonic() + 240
            while max(logged(), default=0) <= step:
                assert run.poll() is None, run.stderr.read()
                assert time.monotonic() < end, "nothing happened"
                time.sleep(0.02)
            os.killpg(run.pid, signal.SIGINT)
            said, complaint = run.communicate(timeout=240)
        assert run.returncode == 130, complaint
        return int(re.search(r"stopped at step (\d+)", said)[1]), said.partition("go on with: ")[2].strip()

    step, again = interrupted_after(0, ["tokenmix", "train", "tiny", "--out", str(out), "--no-eval", *fields])
    assert again == f"tokenmix train --resume '{out}'"
    assert json.loads((out / "run.json").read_text())["evaluate"] is False
    later, once_more = interrupted_after(step, shlex.split(again))
    assert later > step
    assert once_more == again
    assert logged() == list(range(1, later + 1))
    values = json.loads((out / "run.json").read_text())["values"]
    assert (values["learning_rate"], values["batch_tokens"], values["model"]["num_hidden_layers"]) == (1e-3, 64, 1)


def test_resume_needs_the_folder_alone_and_knows_what_was_given(recipes, tmp_path, capsys, monkeypatch):
    from tokenmix_core.training.callbacks import StopOnSignal

    out, moved = tmp_path / "run", tmp_path / "moved"
    begun = StopOnSignal.on_step_end

    def stop(self, args, state, control, **rest):
        if state.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return begun(self, args, state, control, **rest)

    monkeypatch.setattr(StopOnSignal, "on_step_end", stop)
    call = ["train", "nano", "--out", str(out), "--learning_rate", "1e-3", "--save_steps", "100", "--no-eval"]
    assert main(call, recipes=recipes) == 130
    assert f"go on with: tokenmix train --resume {out}" in capsys.readouterr().out
    monkeypatch.setattr(StopOnSignal, "on_step_end", begun)
    out.rename(moved)
    # fields that only affect how the run is executed may still be set, by flags in any position
    assert main(["train", "--resume", str(moved), "--logging_steps", "3"], recipes=recipes) == 0
    said = capsys.readouterr()
    assert "trained 4 steps" in said.out
    record = json.loads((moved / "run.json").read_text())
    assert (record["values"]["learning_rate"], record["values"]["logging_steps"]) == (1e-3, 3)
    assert {path.name for path in (moved / "evaluation").iterdir()} <= {"training.json", "training.png", "report.md"}
    for spelling in (["nano", "--out", str(moved), "--resume"], ["--resume", "nano", "--out", str(moved)]):
        assert main(["train", *spelling], recipes=recipes) == 0


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("train", "name a RECIPE, which `info` lists, or the folder of a run to go on with: --resume DIR"),
        ("train --resume DIR", "has no run.json, the manifest of a run; name its recipe, too"),
        ("train --resume DIR --out other", "--resume and --out name two folders"),
        ("train --resume OTHER", "holds a run of 'theirs', a recipe of another package"),
        (
            "train nano --sources data/fineweb-edu-gpt2 --tokenizer no/such --out OUT",
            "make it with: tokenmix data prepare fineweb-edu data/fineweb-edu-gpt2 --tokenizer no/such",
        ),
        (
            "train nano --sources mine --out OUT",
            "make it with: tokenmix data prepare TEXT mine --tokenizer bytes, where",
        ),
    ],
)
def test_a_call_that_lacks_something_is_told_in_one_sentence_what(call, told, recipes, tmp_path, capsys):
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.json").write_text(json.dumps({"recipe": "theirs", "values": {}}))
    places = {"DIR": str(tmp_path), "OTHER": str(other), "OUT": str(tmp_path / "out")}
    assert main([places.get(word, word) for word in call.split()], recipes=recipes) == 2
    said = capsys.readouterr().err.strip()
    assert told in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_second_run_in_a_folder_is_told_who_is_there(recipes, tmp_path, capsys):
    from tokenmix_core._utils.locks import FolderLock

    out = tmp_path / "run"
    assert main(["train", "nano", "--out", str(out), "--no-eval", "--save_steps", "2"], recipes=recipes) == 0
    log = (out / "metrics.jsonl").read_text()
    capsys.readouterr()
    with FolderLock(out, "training"):
        for call in (["nano", "--out", str(out)], ["--resume", str(out)]):
            assert main(["train", *call], recipes=recipes) == 2
            told = capsys.readouterr().err
            assert f"{out} is in use: process {os.getpid()} on " in told
            assert len(told.splitlines()) == 1
    assert (out / "metrics.jsonl").read_text() == log


def test_an_evaluation_that_fails_costs_no_other_and_is_told(recipes, tmp_path, capsys):
    from tokenmix_core.evaluation.options import Suite

    def fail(model, tokenizer, options):
        raise RuntimeError("no such kernel")

    def refuse(model, tokenizer, options):
        raise ValueError("too short")

    suites = {"broken": Suite("raises", fail), "unfit": Suite("refuses", refuse)}
    out = tmp_path / "run"
    call = ["train", "nano", "--out", str(out), "--evaluations", "broken", "unfit", "perplexity-by-position"]
    assert main(call, recipes=recipes, suites=suites) == 2
    said = capsys.readouterr()
    assert (out / "model.safetensors").exists()
    assert {"training.json", "perplexity-by-position.json", "samples.json"} <= {
        p.name for p in (out / "evaluation").iterdir()
    }
    last = said.err.strip().splitlines()[-1]
    assert "2 of 4 evaluations failed (broken: no such kernel; unfit: too short)" in last
    assert "perplexity-by-position, samples ran" in last
    # a bug is printed with its traceback, wrong input is not
    assert said.err.count("Traceback") == 1


def test_a_length_that_does_not_fit_costs_no_other_length(recipes, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "nano", "--out", str(out), "--no-eval"], recipes=recipes) == 0
    call = ["eval", str(out), "--suite", "niah", "--tasks", "s-niah-1", "--lengths", "64,512", "--limit", "2"]
    capsys.readouterr()
    assert main(call, recipes=recipes) == 2
    said = capsys.readouterr().err.strip().splitlines()
    told = "niah, s-niah-1 at 64 tokens"
    assert any(line.startswith(f"{told} failed: ") for line in said)
    assert f"1 parts of evaluations failed ({told}: " in said[-1]
    assert said[-1].endswith("results of the other parts are kept")
    result = json.loads((out / "evaluation" / "niah.json").read_text())
    assert [row["length"] for row in result["rows"]] == [512]
    assert list(result["settings"]["failed"]) == ["s-niah-1 at 64 tokens"]


@pytest.mark.parametrize("out", ["file", "file/inside", "link"])
def test_results_that_cannot_be_written_are_told_before_a_model_is_loaded(out, recipes, tmp_path, capsys, monkeypatch):
    from tokenmix_core.cli import commands

    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(commands, "load_model", None)
    call = ["eval", str(tmp_path / "model"), "--suite", "mqar", "--out", str(tmp_path / out)]
    assert main(call, recipes=recipes) == 2
    said = capsys.readouterr().err
    told = {
        "file": "file is a file, expected a folder",
        "file/inside": "inside cannot be written to (Not a directory); choose another folder",
        "link": "link is a symbolic link to",
    }[out]
    assert told in said
    assert len(said.splitlines()) == 1


def test_training_that_could_not_be_evaluated_does_not_begin(recipes, tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / f"{name}.txt").write_text(name * 600)
    for name, share, length in (("none", "0", "32"), ("one", "0.001", "1024")):
        corpus = str(tmp_path / name)
        assert main(["data", "prepare", str(tmp_path / "texts"), corpus, "--held-out", share], recipes=recipes) == 0
        call = ["train", "nano", "--out", str(tmp_path / "run"), "--sources", corpus, "--evaluation_lengths", length]
        capsys.readouterr()
        assert main(call, recipes=recipes) == 2
        held_out = {"none": 0, "one": 601}[name]
        told = f"perplexity-by-position needs {int(length):,} tokens of held-out text, and {corpus} has {held_out}"
        assert told in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
    call = ["train", "nano", "--out", str(tmp_path / "run"), "--sources", str(tmp_path / "one")]
    assert main(call, recipes=recipes) == 0


def test_bad_rows_are_skipped_where_that_is_asked_for(recipes, tmp_path, capsys):
    rows = ['{"text": "a"}', '{"text": null}', '{"text": "b"}', "{"]
    (tmp_path / "in.jsonl").write_text("\n".join(rows))
    call = ["data", "prepare", str(tmp_path / "in.jsonl"), str(tmp_path / "out")]
    assert main(call, recipes=recipes) == 2
    assert "must be text, got null; 1 rows before it are kept" in capsys.readouterr().err
    assert main([*call, "--on-bad-row", "skip"], recipes=recipes) == 0
    said = capsys.readouterr()
    assert "of 2 documents; 2 tokens of 1 documents are held out; 2 bad rows were skipped" in said.out
    assert "line 4: not valid JSON" in said.err


def test_eval_writes_beside_the_checkpoint_or_where_it_is_told(checkpoint, recipes, tmp_path, text_file, capsys):
    call = ["eval", str(checkpoint), "--suite", "mqar", "--suite", "perplexity-by-position"]
    call += ["--lengths", "64,32", "--limit", "2", "--batch-size", "2", "--text", text_file, "--seed", "3"]
    out = tmp_path / "out"
    before = set(checkpoint.iterdir())
    assert main([*call, "--out", str(out)], recipes=recipes) == 0
    assert {"mqar.json", "perplexity-by-position.json", "report.md"} <= {p.name for p in out.iterdir()}
    assert set(checkpoint.iterdir()) == before
    result = json.loads((out / "mqar.json").read_text())
    assert result["settings"]["seed"] == 3
    assert {row["length"] for row in result["rows"]} == {32, 64}
    assert "mqar-64-16" in capsys.readouterr().out


def test_any_causal_model_of_transformers_can_be_evaluated(tokenizer, recipes, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=264, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    call = ["eval", str(tmp_path / "gpt2"), "--suite", "mqar", "--suite", "niah", "--suite", "efficiency"]
    call += ["--lengths", "450", "--limit", "1"]
    assert main([*call, "--tasks", "s-niah-1"], recipes=recipes) == 2
    assert main([*call[:4], *call[8:]], recipes=recipes) == 0
    assert main([*call[:2], *call[4:6], *call[8:], "--tasks", "s-niah-1"], recipes=recipes) == 0
    assert main([*call[:2], *call[6:]], recipes=recipes) == 0
    written = {p.name for p in (tmp_path / "gpt2" / "evaluation").glob("*.json")}
    assert written == {"mqar.json", "niah.json", "efficiency.json"}


def test_a_package_brings_its_own_suites_beside_cores(checkpoint, recipes, tmp_path, capsys):
    from tokenmix_core.evaluation.options import Suite

    def run(model, tokenizer, options):
        row = {
            "layers": model.config.num_hidden_layers,
            "decoded": tokenizer.decode([104, 105]),
            "limit": options.limit,
        }
        return {"suite": "own", "settings": {}, "rows": [row], "plots": []}

    suites = {"own": Suite("the paper's own measurement", run)}
    call = ["eval", str(checkpoint), "--suite", "own", "--out", str(tmp_path), "--limit", "7"]
    assert main(call, recipes=recipes, suites=suites) == 0
    assert json.loads((tmp_path / "own.json").read_text())["rows"] == [{"layers": 2, "decoded": "hi", "limit": 7}]
    assert main(["info"], recipes=recipes, suites=suites) == 0
    assert "the paper's own measurement" in capsys.readouterr().out


def test_registries_are_found_by_module_and_attribute(tmp_path, monkeypatch, capsys):
    (tmp_path / "some_paper.py").write_text(
        "class R:\n    description = 'its recipe'\nRECIPES = {'its': R}\n__version__ = '7.8'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["info"], recipes="some_paper:RECIPES") == 0
    out = capsys.readouterr().out
    assert "its recipe" in out
    assert f"tokenmix-core {tokenmix_core.__version__}, some-paper 7.8, Python 3" in out


def test_generate_is_what_the_model_generates(checkpoint, recipes, tokenizer, capsys, monkeypatch):
    from tokenmix_core.modeling import HybridForCausalLM

    model = HybridForCausalLM.from_pretrained(checkpoint).eval()
    ids = tokenizer("abc", return_tensors="pt")["input_ids"]
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=6, do_sample=False)[0], skip_special_tokens=True)
    call = ["generate", str(checkpoint), "--max-new-tokens", "6", "--device", "cpu", "--dtype", "float32"]
    assert main([*call, "--prompt", "abc", "--temperature", "0"], recipes=recipes) == 0
    assert capsys.readouterr().out == expected + "\n"
    monkeypatch.setattr("sys.stdin", type("Input", (), {"read": lambda self: "abc"})())
    assert main([*call, "--prompt", "-", "--temperature", "0"], recipes=recipes) == 0
    assert capsys.readouterr().out == expected + "\n"

    def sampled(*extra):
        assert main([*call, "--prompt", "", "--temperature", "2", *extra], recipes=recipes) == 0
        return capsys.readouterr().out

    assert sampled("--seed", "1") == sampled("--seed", "1") != sampled("--seed", "2")


def test_bench_measures_recipes_and_checkpoints(checkpoint, recipes, tmp_path, capsys):
    call = ["--lengths", "16", "--repeats", "1", "--device", "cpu", "--dtype", "float32"]
    assert main(["bench", "nano", *call, "--out", str(tmp_path)], recipes=recipes) == 0
    assert {"training.json", "efficiency.json"} <= {p.name for p in tmp_path.iterdir()}
    assert main(["bench", str(checkpoint), *call], recipes=recipes) == 0
    out = capsys.readouterr().out
    assert out.count("step ms") == out.count("decode ms/token") == 2


def test_data_prepare_makes_a_token_file_once(text_file, recipes, tmp_path, capsys):
    from tokenmix_core.data.token_file import TokenFile

    call = ["data", "prepare", text_file, str(tmp_path / "tokens"), "--held-out", "0"]
    assert main(call, recipes=recipes) == 0
    assert len(TokenFile(tmp_path / "tokens")) > 10_000
    assert "tokens of 1 documents" in capsys.readouterr().out
    before = (tmp_path / "tokens" / "tokens.bin").stat()
    assert main(call, recipes=recipes) == 0
    assert (tmp_path / "tokens" / "tokens.bin").stat() == before
    capsys.readouterr()
    assert main([*call[:-1], "0.1"], recipes=recipes) == 2
    assert "exists already" in capsys.readouterr().err


def test_info_tells_sizes_without_making_weights(checkpoint, recipes, capsys):
    from tokenmix_core.modeling import HybridForCausalLM

    model = HybridForCausalLM.from_pretrained(checkpoint)
    for target in ("nano", str(checkpoint)):
        assert main(["info", target, "--lengths", "100"], recipes=recipes) == 0
        out = capsys.readouterr().out
        assert f"{model.num_parameters():,}" in out
        assert f"{model.state_bytes(100, 1, torch.bfloat16):,} bytes" in out
        assert "gated_delta_net, attention" in out


def test_the_fields_that_info_shows_are_a_config_of_the_same_recipe(recipes, tmp_path, capsys):
    from tokenmix_core.training.overrides import overridden

    assert main(["info", "nano", "--fields"], recipes=recipes) == 0
    path = tmp_path / "nano.yaml"
    path.write_text(capsys.readouterr().out)
    made = recipes["nano"]()
    assert overridden(made, config=path) == made
    changed = path.read_text().replace(f"seed: {made.run.seed}", "seed: 91")
    path.write_text(changed)
    assert overridden(made, config=path).run.seed == 91


def test_every_field_is_described_where_it_is_set_and_where_it_is_shown(recipes, capsys):
    values = recipes["nano"]().values()
    model = values.pop("model")
    assert main(["train", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "tokenmix train tiny --total_tokens" in shown
    assert "--seq_len VALUE tokens in a row." in shown
    for name in values:
        assert f"--{name} VALUE " in shown
    assert main(["info", "nano", "--fields"], recipes=recipes) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in [*values, *(f"  {field}" for field in model)]:
        at = next(i for i, line in enumerate(lines) if line.startswith(f"{name}:"))
        assert lines[at - 1].strip().startswith("# "), name
    # a field that the recipe does not set is listed with its default
    assert lines[lines.index("  # norm_eps: 1.0e-06") - 1] == "  # epsilon of all norms."


def test_info_lists_what_there_is(recipes, capsys):
    assert main(["info"], recipes=recipes) == 0
    out = capsys.readouterr().out
    for word in ("torch 2", "transformers 5", "two layers for tests", "perplexity-by-position", "mamba2", "chunk_ssd"):
        assert word in out


def test_info_tells_the_kernels_of_a_chip_that_is_not_here(recipes, capsys):
    assert main(["info", "--chip", "sm_89"], recipes=recipes) == 0
    out = capsys.readouterr().out
    assert out.startswith("sm_89: 101,376 bytes of shared memory a block; no test has run on it")
    assert re.search(r"chunk_ssd +triton, as Gluon, .* needs a CUDA device .* got sm_89", out)
    assert main(["info", "--chip", "sm_90"], recipes=recipes) == 0
    assert re.search(r"chunk_ssd +gluon", capsys.readouterr().out)
    assert main(["info", "--chip", "volta"], recipes=recipes) != 0
    assert "must be one of sm_80" in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_without_a_traceback(recipes, capsys, monkeypatch):
    from tokenmix_core.cli import info

    def stop(args, context):
        raise KeyboardInterrupt

    monkeypatch.setattr(info, "info", stop)
    assert main(["info"], recipes=recipes) == 130
    assert capsys.readouterr().err == "\ntokenmix info: stopped\n"


def test_an_error_of_ours_keeps_its_traceback(recipes, monkeypatch):
    from tokenmix_core.cli import info

    def fail(args, context):
        raise AssertionError("an invariant")

    monkeypatch.setattr(info, "info", fail)
    with pytest.raises(AssertionError, match="an invariant"):
        main(["info"], recipes=recipes)


def twice(args, context):
    """What the command below runs."""
    print(2 * args.number, args.rest, sorted(context.recipes))
    return 3 if args.number < 0 else 0


def test_a_package_s_own_command_runs_beside_core_s(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "own_commands", sys.modules[__name__])

    def own(add):
        add("twice", "double a number", "21", "own_commands:twice").add_argument("number", type=int)
        add("free", "take any field", "21", "own_commands:twice", takes_fields=True).add_argument("number", type=int)

    def call(*arguments):
        return main(arguments, prog="tokenmix-paper", recipes={"nano": None}, commands=own)

    assert call("twice", "21") == 0
    assert capsys.readouterr().out == "42 [] ['nano']\n"
    assert call("twice", "-1") == 3
    capsys.readouterr()
    assert call("twice", "21", "--seed", "1") == 2
    assert "unexpected argument '--seed'" in capsys.readouterr().err
    assert call("free", "21", "--seed", "1") == 0
    assert "['--seed', '1']" in capsys.readouterr().out
    assert call("--help") == 0
    shown = capsys.readouterr().out
    assert "double a number" in shown
    assert "evaluate a checkpoint" in shown
