"""Change a recipe's fields by a YAML file and by flags."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tokenmix_core._utils.strict_yaml import load_yaml
from tokenmix_core.training.fitting import fitted
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens


def overridden(
    recipe: Recipe, flags: Sequence[str] = (), config: str | Path | Mapping[str, Any] | None = None
) -> Recipe:
    """Return the recipe with fields replaced, first by those of a YAML file, then by those that flags set.

    If `total_tokens` is lowered and `warmup_tokens` is not given, the warm-up keeps its fraction of the run. If the
    depth or width changes and mixers or heads are not given, the model gets mixers or heads that fit. Each such change
    is reported by a line on stderr.

    Args:
        recipe: the recipe to change.
        flags: `--field value ...`; `--model.field value` sets a field of the model's config, and
            `--model.mixer_options.label.option value` sets one entry of a field that is a dictionary.
        config: a YAML file with lines `field: value` and, below `model:`, fields of the model's config; or a mapping of
            this form, such as `Recipe.values` returns.

    Raises:
        ValueError: an unknown field (the message names the most similar one), or a value that does not fit its field.
    """
    parser = _parser(recipe)
    model = dict(recipe.model)
    if config is not None:
        read = (config, "the manifest's fields") if isinstance(config, Mapping) else (_yaml_file(config), str(config))
        flags = [*_field_flags(*read, parser), *flags]
    flags = list(flags)
    rest = []
    given: dict[str, list[list[str]]] = {}
    position = 0
    while position < len(flags):
        flag, equals, value = flags[position].partition("=")
        position += 1
        if not flag.startswith("--model."):
            rest.append(flags[position - 1])
            continue
        if not equals:
            if position == len(flags):
                raise ValueError(f"{flag} needs a value")
            value = flags[position]
            position += 1
        name, *inside = flag.removeprefix("--model.").split(".")
        name = _known_name(flag, name, _model_fields(recipe))
        model[name] = _with(model.get(name), inside, _yaml_value(flag, value), flag)
        given.setdefault(name, []).append(inside)
    model, changes = fitted(model, given)
    for line in changes:
        _note(line)
    _scale_warmup(recipe.optimizer, parser, rest)
    *groups, unknown = parser.parse_args_into_dataclasses(rest, return_remaining_strings=True, look_for_args_file=False)
    for text in unknown:
        if text.startswith("--"):
            flag = text.partition("=")[0]
            _known_name(flag, flag[2:].replace("-", "_"), [*_fields(), "model.FIELD"])
    if unknown:
        raise ValueError(f"unexpected argument {unknown[0]!r}; fields are given as --field value")
    data, optimizer, run = groups
    changed = dataclasses.replace(recipe, model=model, data=data, optimizer=optimizer, run=run)
    changed.model_config()
    return changed


def _scale_warmup(optimizer: OptimizerRecipe, parser: Any, flags: Sequence[str]) -> None:
    known, _ = parser.parse_known_args(flags)
    given = any(flag.partition("=")[0] in ("--warmup_tokens", "--warmup-tokens") for flag in flags)
    old, total = optimizer.total_tokens, known.total_tokens
    warmup = optimizer.warmup_tokens * max(total, 0) // old
    if given or total >= old or warmup == optimizer.warmup_tokens:
        return
    parser.set_defaults(warmup_tokens=Tokens(warmup))
    _note(
        f"warmup_tokens is {warmup:,} instead of {optimizer.warmup_tokens:,}, the same share of "
        f"total_tokens={total:,} as of {old:,}; --warmup_tokens sets another"
    )


def _note(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def _fields() -> list[str]:
    return [f.name for group in (DataRecipe, OptimizerRecipe, RunRecipe) for f in dataclasses.fields(group)]


def _model_fields(recipe: Recipe) -> list[str]:
    # a late import: transformers takes a second to import, and the command `info` does not need it
    from tokenmix_core.modeling.config import DERIVED, HybridConfig

    config = recipe.model_config()
    derived = DERIVED if isinstance(config, HybridConfig) else ()
    return [name for name in config.to_dict() if not name.startswith("_") and name not in derived]


def _known_name(shown: str, name: str, known: Sequence[str]) -> str:
    if name in known:
        return name
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"the nearest is {near[0]!r}" if near else "`info RECIPE --fields` shows all"
    raise ValueError(f"unknown field {shown}; {hint}")


def _with(old: Any, inside: Sequence[str], value: Any, flag: str) -> Any:
    """Return `value` or, if `inside` has keys, a copy of `old` in which `value` is the entry under these keys."""
    if not inside:
        return value
    if not isinstance(old, Mapping | None):
        raise ValueError(f"{flag}: there is no {inside[0]!r} inside {old!r}")
    return {**(old or {}), inside[0]: _with((old or {}).get(inside[0]), inside[1:], value, flag)}


def _parser(recipe: Recipe) -> Any:
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        def error(self, message: str) -> Any:
            raise ValueError(message)

    groups: Any = [DataRecipe, OptimizerRecipe, RunRecipe]
    parser = Parser(groups, add_help=False, allow_abbrev=False)
    parser.set_defaults(**{k: v for k, v in recipe.values().items() if k != "model"})
    return parser


def _yaml_value(flag: str, text: str) -> Any:
    try:
        value = load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{flag}: {text!r} is not valid YAML: {error}") from error
    if isinstance(value, str):
        # convert strings such as 1e-6, which YAML does not read as a number
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _yaml_file(path: str | Path) -> Any:
    try:
        return load_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error


def _field_flags(content: Any, path: str, parser: Any) -> list[str]:
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} must hold `field: value` lines, got {type(content).__name__}")
    flags: list[str] = []
    model = content.get("model") or {}
    if not isinstance(model, dict):
        raise ValueError(f"{path}: model must hold `field: value` lines, got {type(model).__name__}")
    flags += [f"--model.{key}={yaml.safe_dump(value, default_flow_style=True).strip()}" for key, value in model.items()]
    for key, value in content.items():
        if key == "model":
            continue
        name = _known_name(f"{key!r} in {path}", str(key), _fields())
        if isinstance(value, list):
            if value:
                flags += [f"--{name}", *map(str, value)]
            else:
                parser.set_defaults(**{name: []})
        elif isinstance(value, dict) or value is None:
            raise ValueError(f"{path}: {name} must have one value or a list of them, got {value!r}")
        else:
            flags.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
    return flags
