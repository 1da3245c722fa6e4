"""The command line of all packages: `train`, `eval`, `generate`, `serve`, and the further commands in `--help`.

A paper's console script calls `main` with its own recipes and suites. torch and transformers are imported only when a
command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from tokenmix_core._utils.optional import PACKAGE
from tokenmix_core._utils.trust import trusting
from tokenmix_core.cli.packages import packages_of

# a function of a command's name, summary, example and "module:function" that adds the command; with `takes_fields=True`
# flags may set a recipe's fields
AddCommand = Callable[..., argparse.ArgumentParser]
# errors that the user can correct; they are printed as one sentence, without a traceback
USER_ERRORS = (ValueError, FloatingPointError, OSError, ImportError)


def main(
    argv: Sequence[str] | None = None,
    *,
    prog: str = "tokenmix",
    recipes: Mapping[str, Any] | str | None = None,
    suites: Mapping[str, Any] | str | None = None,
    commands: Callable[[AddCommand], None] | None = None,
    arguments: Callable[[argparse.ArgumentParser], None] | None = None,
    using: str | None = None,
) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the arguments; by default those of the process.
        prog: name of the console script.
        recipes: functions that return recipes, by name, or "module:attribute" of such a mapping; by default core's
            baselines. Importing the module must register the package's models.
        suites: evaluation suites in addition to core's, by name, or "module:attribute" of such a mapping.
        commands: function that adds a package's own commands. It gets a function `add(name, summary, example,
            "module:function")`, which returns the command's parser for adding arguments. The function named by
            "module:function" takes the parsed arguments and the `commands.Context`; its module is imported when the
            command runs.
        arguments: function that adds a package's own arguments to the parsers of `eval`, `generate`, `serve` and
            `bench`.
        using: "module:function" that applies these arguments: it takes the model and the parsed arguments, and returns
            a context manager, inside which these commands use the model.

    Returns:
        0 for success, 2 for a wrong call, wrong input or too little memory, 130 if Ctrl-C stopped the command or a
        signal stopped training, else the exit code of the command.
    """
    # defaults that the user can override: quieter libraries, no progress bars for work of less than a second
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TQDM_DELAY", "1")
    # set before torch is loaded: OpenMP's threads otherwise spin at barriers, which is slow if another process needs
    # the core
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    parser = _parser(prog, commands, arguments)
    packages = packages_of(recipes, suites)
    parser.add_argument("--version", action=_Version, nargs=0, const=packages, help="print the packages' versions")
    try:
        args, args_rest = parser.parse_known_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    name = args.parser.prog
    if args_rest and not args.takes_fields:
        print(f"{name}: error: unexpected argument {args_rest[0]!r} (see {name} --help)", file=sys.stderr)
        return 2
    args.rest = args_rest
    token = PACKAGE.set(packages[-1].replace("_", "-"))
    if "RANK" in os.environ:
        # otherwise torch prints C++ traces of lost connections between the error messages of ranks
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from tokenmix_core.cli.commands import Context

        module, _, function = args.run.partition(":")
        with trusting(args.trust_remote_code):
            return getattr(importlib.import_module(module), function)(args, Context(recipes, suites, using)) or 0
    except BrokenPipeError:
        # the reader of the output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except USER_ERRORS as error:
        from tokenmix_core.cli.commands import sentence

        _close_progress()
        print(f"{name}: error: {sentence(error)}", file=sys.stderr)
        return 2
    except (RuntimeError, MemoryError) as error:
        if not _lacks_memory(error):
            raise
        _close_progress()
        told = (str(error).strip().splitlines() or ["out of memory"])[0]
        print(f"{name}: error: there is not enough memory for these sizes: {told}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        _close_progress()
        print(f"\n{name}: stopped", file=sys.stderr)
        return 130
    finally:
        PACKAGE.reset(token)


def _lacks_memory(error: Exception) -> bool:
    """True if an error of torch says that there is not enough memory."""
    # compare the text: torch's CPU allocator raises a plain RuntimeError
    parts = ("out of memory", "can't allocate memory", "not enough memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(part in str(error) for part in parts)


def _close_progress() -> None:
    """Close the progress display that was open when an error was raised, so that the message has its own line."""
    if "tqdm" in sys.modules:
        from tqdm import tqdm

        for display in list(getattr(tqdm, "_instances", ())):
            display.close()


class _Version(argparse.Action):
    """Print the versions of the packages in `const`, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
        packages: Any = self.const
        versions = (getattr(importlib.import_module(package), "__version__", "") for package in packages)
        print(", ".join(f"{p.replace('_', '-')} {v}".rstrip() for p, v in zip(packages, versions, strict=True)))
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """A parser that prints errors on one line, takes no abbreviations, and shows defaults except None and False."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def format_help(self) -> str:
        shown = super().format_help()
        return f"{shown}\n{_fields_help()}" if self.get_default("takes_fields") else shown


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, False, argparse.SUPPRESS) and "(default" not in (action.help or "")
        return super()._get_help_string(action) if shown else action.help


def _parser(
    prog: str,
    more: Callable[[AddCommand], None] | None = None,
    arguments: Callable[[argparse.ArgumentParser], None] | None = None,
) -> _Parser:
    parser = _Parser(prog=prog, description="Train, evaluate and use language models that mix token mixers.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        group: Any, name: str, summary: str, example: str, run: str = "", takes_fields: bool = False
    ) -> argparse.ArgumentParser:
        sub = group.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        sub.epilog = f"example: {sub.prog} {example}"
        sub.add_argument(
            "--trust-remote-code",
            action="store_true",
            help="run Python code of a model's folder, a repository or a folder of tasks",
        )
        sub.set_defaults(run=run or f"tokenmix_core.cli.commands:{name}", parser=sub, takes_fields=takes_fields)
        return sub

    example = "tiny --total_tokens 1M --out runs/a"
    sub = command(commands, "train", "run a recipe, then its evaluations", example, takes_fields=True)
    # RECIPE is read from the remaining arguments: an optional positional could take the value of a field's flag
    sub.usage = (
        f"{sub.prog} RECIPE [--out DIR] [--no-eval] [--config FILE] [--FIELD VALUE ...]\n       {sub.prog} --resume DIR"
    )
    sub.description = f"{sub.description} RECIPE is one that `info` lists; --FIELD VALUE sets a field of it."
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/RECIPE)")
    resume = "go on from the last checkpoint of the run in DIR (or --out), with its recipe, fields and --no-eval"
    sub.add_argument("--resume", nargs="?", const=True, metavar="DIR", help=resume)
    sub.add_argument("--no-eval", action="store_true", help="do not evaluate the trained model")
    sub.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML file of fields, as `info RECIPE --fields` prints them"
    )

    sub = command(commands, "eval", "evaluate a checkpoint", "runs/tiny --suite mqar --suite niah --lengths 1024,2048")
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a trained model")
    sub.add_argument("--suite", action="append", help="a suite, may be repeated; `info` lists them")
    sub.add_argument("--out", type=Path, metavar="DIR", help="folder for results (default: CHECKPOINT/evaluation)")
    sub.add_argument(
        "--tasks", type=_names, metavar="A,B", help="only these tasks of the suite; without one, any tasks of lm-eval"
    )
    sub.add_argument("--include", type=_names, metavar="DIR", help="folder with further tasks for lm-eval")
    add_eval_options(sub)

    sub = command(commands, "generate", "continue a text", 'runs/tiny --prompt "def main(" --temperature 0.7')
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a trained model")
    sub.add_argument("--prompt", required=True, metavar="TEXT", help="what to continue; - reads standard input")
    sub.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="tokens to generate at most")
    sub.add_argument("--temperature", type=float, default=0.8, metavar="X", help="0 takes the likeliest token always")
    sub.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="sample from the K likeliest tokens; 0: from all"
    )
    sub.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="sample from the likeliest of joint probability P"
    )
    sub.add_argument("--seed", type=int, default=0, metavar="S", help="what the sampling depends on")
    add_device(sub)

    serve = "tokenmix_core.cli.serve:serve"
    sub = command(commands, "serve", "answer requests of OpenAI's API", "runs/tiny --port 8000", serve)
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a trained model")
    sub.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 lets other machines reach it")
    sub.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one")
    sub.add_argument("--name", help="what clients call the model (default: the folder's name)")
    sub.add_argument(
        "--max-model-len",
        type=int,
        metavar="T",
        help="most tokens of a request with its answer (default: the length that the model was trained on)",
    )
    sub.add_argument("--max-requests", type=int, metavar="N", help="requests that run at the same time, others wait")
    sub.add_argument(
        "--max-waiting",
        type=int,
        default=1 << 14,
        metavar="N",
        help="answers that wait or run, further requests get 429 (default: 16384)",
    )
    sub.add_argument("--max-batch-tokens", type=int, metavar="T", help="tokens of all requests in a forward pass")
    sub.add_argument(
        "--prefix-cache", type=int, default=0, metavar="BYTES", help="memory for states that prompts share (default: 0)"
    )
    add_device(sub)

    sub = command(commands, "bench", "measure a model's speed and memory on this machine", "tiny --lengths 512,2048")
    sub.add_argument("target", metavar="RECIPE|CHECKPOINT", help="a recipe's model gets random weights")
    sub.add_argument(
        "--lengths", type=positive_integers, default="512,1024,2048", metavar="T,T", help="context lengths in tokens"
    )
    sub.add_argument("--batch-size", type=int, default=1, metavar="B", help="sequences at a time")
    sub.add_argument("--repeats", type=int, default=3, metavar="N", help="runs that the median is taken of")
    sub.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for tables, plots and JSON; without it none is written"
    )
    add_device(sub)

    example = "runs/tiny me/tiny --dry-run"
    push = "tokenmix_core.cli.hub:push"
    sub = command(commands, "push", "write a model card and upload a model to the hub", example, push)
    sub.add_argument("checkpoint", metavar="CHECKPOINT", help="folder of a trained model, or of its run")
    sub.add_argument("repo", metavar="NAME", help="repository of the hub, as USER/NAME")
    sub.add_argument("--dry-run", action="store_true", help="write the card into the folder, and upload nothing")
    sub.add_argument("--keep-card", action="store_true", help="upload the README.md that is there")
    sub.add_argument("--private", action="store_true", help="make a repository that others cannot see")
    sub.add_argument("--license", metavar="ID", help="of the model, such as apache-2.0")

    data = commands.add_parser("data", help="prepare corpora", description="Prepare corpora.")
    group = data.add_subparsers(required=True, metavar="COMMAND")
    example = "fineweb-edu corpora/fineweb --tokenizer gpt2 --max-tokens 15000000000"
    sub = command(
        group, "prepare", "tokenize a corpus into one memory-mapped file; stopped, it goes on when rerun", example
    )
    sub.add_argument(
        "source", metavar="SOURCE", help="stdlib, fineweb-edu, slimpajama, a hub dataset, a file or a folder"
    )
    sub.add_argument("output", type=Path, metavar="DIR", help="folder to make")
    sub.add_argument("--tokenizer", default="bytes", metavar="NAME", help="bytes, or one of the hub or of a folder")
    sub.add_argument("--text-field", default="text", metavar="NAME", help="field that holds the text")
    sub.add_argument("--subset", metavar="NAME", help="configuration of a hub dataset")
    sub.add_argument("--split", default="train", metavar="NAME", help="split of a dataset")
    sub.add_argument("--held-out", type=float, default=0.001, metavar="X", help="share of documents to hold out")
    sub.add_argument("--max-tokens", type=int, metavar="N", help="stop after so many tokens")
    sub.add_argument(
        "--on-bad-row",
        choices=("stop", "skip"),
        default="stop",
        help="at a row without text, stop and keep the rows before it, or skip it and count",
    )
    sub.add_argument(
        "--special-tokens",
        action="store_true",
        help="turn text that spells a special token, such as <|endoftext|>, into that token",
    )
    sub.add_argument("--workers", type=int, metavar="N", help="processes that tokenize (default: one per core)")

    summary = "show versions, recipes and suites, or describe a model"
    sub = command(commands, "info", summary, "tiny", "tokenmix_core.cli.info:info")
    sub.add_argument("target", nargs="?", metavar="RECIPE|CHECKPOINT", help="the model to describe")
    sub.add_argument(
        "--lengths", type=positive_integers, default="2048,32768", metavar="T,T", help="contexts to size the cache for"
    )
    sub.add_argument(
        "--fields",
        action="store_true",
        help="show a recipe's fields and what they mean, as the YAML that --config takes",
    )
    sub.add_argument("--chip", metavar="sm_89", help="show the kernels of each operation on a chip, also without it")
    if arguments is not None:
        for name in ("eval", "generate", "serve", "bench"):
            arguments(commands.choices[name])
    if more is not None:
        more(partial(command, commands))
    if "convert" not in commands.choices:
        # unless the package has its own command `convert`, add core's
        example = "models/mamba2-130m --out models/ours"
        sub = command(commands, "convert", "read another library's model folder, or write FLA's", example)
        sub.add_argument(
            "source", type=Path, metavar="DIR", help="of FLA, state-spaces or transformers; with --to, one of ours"
        )
        sub.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
        sub.add_argument("--to", choices=("fla",), help="write this library's layout instead of reading it")
        sub.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16 (default: as the folder has it)")
    return parser


def _fields_help() -> str:
    """Return the help text of a recipe's fields, in the form of options with descriptions."""
    from tokenmix_core._utils.validation import described
    from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, RunRecipe

    shown = _Parser(usage=argparse.SUPPRESS, add_help=False)
    for title, part in (("data", DataRecipe), ("optimizer", OptimizerRecipe), ("run", RunRecipe)):
        group, texts = shown.add_argument_group(f"fields of the recipe: {title}"), described(part)
        for field in dataclasses.fields(part):
            group.add_argument(f"--{field.name}", metavar="VALUE", help=texts[field.name].replace("%", "%%"))
    group = shown.add_argument_group("fields of the recipe: model")
    group.add_argument("--model.FIELD", metavar="VALUE", help="of its configuration; --model.FIELD.KEY sets one entry")
    return shown.format_help()


def add_eval_options(sub: argparse.ArgumentParser) -> None:
    """Add to a command `--device`, `--dtype` and options of suites, some of which only some suites read."""
    sub.add_argument("--limit", type=int, metavar="N", help="examples for each task")
    sub.add_argument("--lengths", type=positive_integers, metavar="T,T", help="context lengths in tokens")
    sub.add_argument("--max-length", type=int, metavar="T", help="longest prompt with its answer; longer ones are cut")
    sub.add_argument("--batch-size", type=int, metavar="B", help="sequences in one forward pass")
    sub.add_argument(
        "--text", metavar="PATH", help="a token file, or text, JSONL or parquet (default: built-in corpus)"
    )
    sub.add_argument("--vocab-size", type=int, metavar="V", help="tokens that synthetic sequences are made of")
    sub.add_argument("--seed", type=int, default=0, metavar="S", help="what random data depends on")
    add_device(sub)


def add_device(sub: argparse.ArgumentParser) -> None:
    """Add to a command `--device` and `--dtype`."""
    sub.add_argument("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    sub.add_argument("--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on a GPU, float32 on a CPU)")


def positive_integers(text: str) -> tuple[int, ...]:
    """Return the positive integers in a text that separates them by commas."""
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise argparse.ArgumentTypeError(f"expected positive integers separated by commas, got {text!r}")
    return lengths


def layer_indices(text: str) -> tuple[int, ...]:
    """Return the indices of layers in a text that separates them by commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected layers separated by commas, got {text!r}") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


if __name__ == "__main__":
    sys.exit(main())
