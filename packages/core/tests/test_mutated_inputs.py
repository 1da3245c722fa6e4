"""Test that randomly damaged folders, recipes and commands end soon in a result or one sentence, never in a traceback.

`TOKENMIX_MUTATIONS=200 TOKENMIX_MUTATION_SEED=7 pytest packages/core/tests/test_mutated_inputs.py` draws other and more
inputs. A case is drawn from its seed and number alone, so that a fault can be repeated.
"""

import hashlib
import json
import os
import random
import re
import shutil
import signal
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenmix_core.cli.app import main
from tokenmix_core.training.checkpoint import write_manifest
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens
from tokenmix_core.training.trainer import train

COUNT = int(os.environ.get("TOKENMIX_MUTATIONS", "30"))
SEED = int(os.environ.get("TOKENMIX_MUTATION_SEED", "0"))
# limit CPU time, which other processes do not lengthen
SECONDS = 8
MODEL = {"vocab_size": 264, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "mixers": ["attention"]}
VALUES = [
    None, True, False, -1, 0, 1, 2, 3, 7, 0.5, -0.5, 1e308, 10**9, 10**12, 2**63, 10**30, float("nan"), float("inf"),
    "", "x", "0", "1e3", "None", "bfloat16", "../x", "a" * 300, "\u0000", "é", [], [1], ["x"], [None], {}, {"a": 1},
    {"x": {"y": []}}, [[]], "attention", ["attention"], ["mamba2", 3],
]  # fmt: skip
TEXTS = [
    b"", b"null", b"[]", b"{}", b"3", b'"x"', b"{", b"[" * 50_000, b'{"a":' * 50_000, b"\xff\xfe\x00",
    b"\xef\xbb\xbf{}", b"\0" * 64, b"NaN",
]  # fmt: skip
# messages about Python objects do not help a user
KNOWN = "a file holds a value that transformers cannot use"
INTERNALS = re.compile(
    r"object has no attribute|not supported between|unexpected keyword|is not subscriptable|is not iterable"
    r"|indices must be|unhashable|positional argument|object is not|has no len|unsupported operand|NoneType"
)
FILES = {
    "model": (
        "config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json",
        "generation_config.json",
    ),
    "tokens": ("meta.json", "documents.npy", "tokens.bin"),
    "run": (
        "run.json", "metrics.jsonl", "checkpoint-2/trainer_state.json", "checkpoint-2/manifest.json",
        "checkpoint-2/optimizer.pt", "checkpoint-2/scheduler.pt", "checkpoint-2/rng_state.pth",
        "checkpoint-2/model.safetensors", "checkpoint-2/config.json",
    ),
}  # fmt: skip
COMMANDS = {
    "model": (
        ["generate", "MODEL", "--prompt", "ab", "--max-new-tokens", "2"],
        ["info", "MODEL"],
        ["eval", "MODEL", "--suite", "mqar", "--limit", "1", "--lengths", "64", "--out", "OUT"],
        ["convert", "MODEL", "--out", "OUT"],
    ),
    "tokens": (
        ["train", "nano", "--sources", "TOKENS", "--out", "OUT", "--no-eval"],
        ["eval", "MODEL", "--suite", "perplexity-by-position", "--text", "TOKENS", "--lengths", "64", "--limit", "2",
         "--out", "OUT"],
    ),
    "run": (["train", "--resume", "RUN"], ["train", "nano", "--resume", "--out", "RUN"]),
}  # fmt: skip
# commands whose arguments are changed, with further flags
CALLS = (
    (COMMANDS["model"][0], ("--temperature", "--top-k", "--top-p", "--seed", "--device", "--dtype", "--prompt")),
    (COMMANDS["model"][2], ("--batch-size", "--vocab-size", "--seed", "--tasks", "--dtype", "--max-length", "--text")),
    (["bench", "MODEL", "--lengths", "16", "--repeats", "1", "--batch-size", "1"], ("--dtype", "--device", "--out")),
    (["data", "prepare", "TEXT", "OUT", "--workers", "1"],
     ("--held-out", "--max-tokens", "--tokenizer", "--on-bad-row", "--text-field", "--workers")),
    (["train", "nano", "--sources", "TOKENS", "--out", "OUT", "--no-eval"],
     ("--seq_len", "--learning_rate", "--seed", "--precision", "--save_steps", "--logging_steps", "--weights",
      "--model.hidden_size", "--model.mixers", "--model.vocab_size", "--weight_decay", "--config", "--adam_betas")),
    (["info", "nano"], ("--fields", "--x")),
)  # fmt: skip


class TooLong(BaseException):
    """A case takes longer than a user should wait; no command catches this error."""


def nano():
    batch = Tokens(128)
    return Recipe(
        name="nano",
        description="for tests",
        model={**MODEL, "mixer_options": {"attention": {"num_heads": 2}}},
        data=DataRecipe(seq_len=32),
        optimizer=OptimizerRecipe(total_tokens=Tokens(384), batch_tokens=batch, micro_batch_tokens=batch),
        run=RunRecipe(precision="fp32", logging_steps=1, save_steps=2, save_total_limit=9),
    )


@pytest.fixture(scope="module")
def originals(checkpoint, token_file, tmp_path_factory):
    """Return a model folder, a token file, a run that was killed after its second step, and a text."""
    home = tmp_path_factory.mktemp("originals")
    shutil.copytree(checkpoint, home / "MODEL")
    weights = load_file(home / "MODEL" / "model.safetensors")
    save_file(weights, home / "MODEL" / "model.safetensors", metadata={"format": "pt"})
    (home / "MODEL" / "generation_config.json").write_text('{"eos_token_id": 256, "max_new_tokens": 3}')
    shutil.copytree(token_file, home / "TOKENS")
    made = nano()
    made = replace(made, data=replace(made.data, sources=[str(home / "TOKENS")]))
    train(made, home / "RUN", progress=False)
    for path in home.glob("RUN/*"):
        if path.name not in ("run.json", "metrics.jsonl", "checkpoint-2"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (home / "TEXT").mkdir()
    (home / "TEXT" / "a.txt").write_text("some text " * 50)
    (home / "TEXT" / "b.txt").write_text("more text " * 50)
    return home


def paths_of(value, path=()):
    """Return the paths of all values inside a JSON value."""
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths_of(inner, (*path, key))


def changed(value, draw):
    """Return a JSON value of which one part was replaced, removed or added."""
    value = json.loads(json.dumps(value))
    path = draw.choice([p for p in paths_of(value) if p] or [()])
    if not path:
        return draw.choice(VALUES)
    parent = value
    for key in path[:-1]:
        parent = parent[key]
    what = draw.random()
    if what < 0.15:
        del parent[path[-1]]
    elif what < 0.25 and isinstance(parent, dict):
        parent[draw.choice(["x", "", "auto_map", "model_type", "quantization_config"])] = draw.choice(VALUES)
    else:
        parent[path[-1]] = draw.choice(VALUES)
    return value


def damage(path, draw):
    """Damage a file; return a description of the damage."""
    what = draw.random()
    if path.suffix == ".safetensors" and what < 0.5:
        tensors = load_file(path)
        name = draw.choice(list(tensors))
        how, x = draw.choice(["nan", "shape", "dtype", "name", "none", "more", "scalar"]), tensors.pop(name)
        tensors |= {
            "nan": {name: torch.full_like(x, torch.nan)},
            "shape": {name: x.flatten()[:-1].clone()},
            "dtype": {name: x.to(draw.choice([torch.float64, torch.float16, torch.int32, torch.bool]))},
            "name": {f"{name}_": x},
            "none": {},
            "more": {name: x, draw.choice(["x", "", "model.x.weight"]): x.clone()},
            "scalar": {name: x.flatten()[0].clone()},
        }[how]
        save_file(tensors, path, metadata=draw.choice([None, {"format": "pt"}, {"format": "tf"}, {"x": "y"}]))
        return f"{name}: {how}"
    if path.suffix == ".npy" and what < 0.5:
        x = np.load(path)
        x = draw.choice([x[::-1], x[:-1], x * 2, x.astype(np.float64), x.reshape(1, -1), x - 1, x[:1], x.astype("O")])
        np.save(path, x)
        return f"{x.dtype} {x.shape}"
    if not path.exists():
        path.write_bytes(draw.choice([*TEXTS, b'{"weight_map": {"a": "../x"}}', b'{"weight_map": []}']))
        return "written"
    if what < 0.08:
        path.unlink()
        return "removed"
    if what < 0.14:
        path.unlink()
        path.symlink_to(draw.choice([path.name, "nothing", "."])) if draw.random() < 0.5 else path.mkdir()
        return "a folder or a link"
    content = path.read_bytes()
    if path.suffix in (".json", ".jsonl") and what < 0.7:
        lines = content.splitlines() if path.suffix == ".jsonl" else [content]
        i = draw.randrange(len(lines))
        lines[i] = json.dumps(changed(json.loads(lines[i]), draw)).encode()
        path.write_bytes(b"\n".join(lines))
        return f"line {i}: {lines[i][:300]}"
    if what < 0.8:
        path.write_bytes(text := draw.choice(TEXTS))
        return f"is {text[:20]}"
    if what < 0.9:
        path.write_bytes(content[: draw.randrange(len(content))])
        return "cut"
    # damage the header more often, since it has more effects
    at = draw.randrange(min(len(content), draw.choice([16, 400, 10**9])))
    path.write_bytes(content[:at] + bytes([draw.randrange(256)]) * draw.choice([1, 8]) + content[at + 1 :])
    return f"byte {at}"


def renew(folder):
    """Write the hashes of damaged files again, as far as that can be done."""
    with suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        content = json.loads((folder / "TOKENS" / "meta.json").read_text())
        content["sha256"] |= {
            name: hashlib.sha256((folder / "TOKENS" / name).read_bytes()).hexdigest() for name in content["sha256"]
        }
        (folder / "TOKENS" / "meta.json").write_text(json.dumps(content))
    with suppress(OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError):
        saved = folder / "RUN" / "checkpoint-2"
        content = json.loads((saved / "manifest.json").read_text())
        (saved / "manifest.json").unlink()
        write_manifest(saved, {name: content[name] for name in ("step", "identity")})


def case(number, originals, folder):
    """Return a command with an error in its arguments or files; files are made in `folder`."""
    draw = random.Random(f"{SEED} {number}")
    kind = ("model", "tokens", "run", "recipe", "arguments")[number % 5]
    for path in originals.iterdir():
        shutil.copytree(path, folder / path.name)
    done = []
    if kind in FILES:
        argv = list(draw.choice(COMMANDS[kind]))
        for name in draw.sample(FILES[kind], draw.choice([1, 1, 2])):
            path = folder / kind.upper() / name
            done.append(f"{name}: {damage(path, draw)}")
        if draw.random() < 0.6:
            # whatever damaged the file, or wrote it so, also wrote its hash
            done.append("sums renewed")
            renew(folder)
    elif kind == "recipe":
        lines = (originals.parent / "nano.yaml").read_text().splitlines()
        for _ in range(draw.choice([1, 1, 2])):
            i = draw.choice([i for i, line in enumerate(lines) if ":" in line and not line.strip().startswith("#")])
            name = lines[i].partition(":")[0]
            value = draw.choice(VALUES)
            lines[i] = draw.choice(
                [f"{name}: {json.dumps(value)}", *3 * [f"{name}: {value}"], f"{name}:\n  - {value}", f"{name} {value}",
                 f"  {lines[i]}", f"{lines[i]}\n{lines[i]}", f"{name}: *x", f"{name}: {{", ""]
            )  # fmt: skip
            done.append(lines[i])
        (folder / "mine.yaml").write_text("\n".join(lines))
        argv = ["train", "nano", "--config", "mine.yaml", "--sources", "TOKENS", "--out", "OUT", "--no-eval"]
        argv += ["--total_tokens", "384", "--batch_tokens", "128", "--micro_batch_tokens", "128"]
    else:
        call, flags = draw.choice(CALLS)
        argv = list(call)
        value = draw.choice(VALUES)
        told = draw.choice([str(value), json.dumps(value)])
        what = draw.random()
        if what < 0.5:
            argv += [draw.choice(flags), *([told] if draw.random() < 0.9 else [])]
        elif what < 0.9:
            argv[draw.randrange(1, len(argv))] = told
        else:
            del argv[draw.randrange(1, len(argv))]
        # a correct call with very many tokens or repetitions is not an error, but takes long
        argv = [
            "9" if word in map(str, (10**9, 10**12, 2**63, 10**30)) and draw.random() < 0.5 else word for word in argv
        ]
    return argv, done


def run_case(number, originals, folder, capsys, monkeypatch):
    """Run a case; return its fault or None, the exit code, and the last line on stderr."""
    argv, done = case(number, originals, folder)
    monkeypatch.chdir(folder)

    def interrupt(*_):
        raise TooLong

    before = signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    capsys.readouterr()
    fault, code = None, None
    try:
        code = main(argv, recipes={"nano": nano})
    except TooLong:
        fault = f"takes longer than {SECONDS} s"
    except BaseException as error:  # every other error is a fault
        frames, trace = [], error.__traceback__
        while trace is not None:
            frames.append(f"{trace.tb_frame.f_code.co_filename.rpartition('site-packages/')[2]}:{trace.tb_lineno}")
            trace = trace.tb_next
        fault = f"{type(error).__name__}: {str(error)[:300]} at {' > '.join(frames[-6:])}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    said = capsys.readouterr().err
    last = (said.strip().splitlines() or [""])[-1]
    if fault is None and "Traceback" in said:
        fault = f"a traceback: {said[-600:]}"
    if fault is None and code != 0 and (found := INTERNALS.search(last)) and KNOWN not in last:
        fault = f"tells of {found.group()!r}: {last}"
    if fault is None and code != 0 and (": error: " not in last or len(last) > 900 or not last.startswith("tokenmix")):
        fault = f"no sentence, exit code {code}: {said[-900:]}"
    return None if fault is None else f"{number}: {argv} {done}: {fault}", code, last


def test_mutated_inputs(originals, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    main(["info", "nano", "--fields"], recipes={"nano": nano})
    (originals.parent / "nano.yaml").write_text(capsys.readouterr().out)
    faults, codes, told = [], [], []
    for number in range(COUNT):
        folder = tmp_path / str(number)
        folder.mkdir()
        fault, code, last = run_case(number, originals, folder, capsys, monkeypatch)
        codes.append(code)
        told.append(f"{number} {code} {last}")
        if fault is not None:
            faults.append(fault)
        torch.manual_seed(0)
    if path := os.environ.get("TOKENMIX_MUTATIONS_LOG"):
        with open(path, "w") as file:
            file.write("\n".join(told) + "\n\n" + "\n".join(faults))
    assert not faults, f"{len(faults)} of {COUNT}:\n" + "\n".join(faults)
    # some damage is found, and some inputs can still be used
    assert 0 < codes.count(0) < COUNT
