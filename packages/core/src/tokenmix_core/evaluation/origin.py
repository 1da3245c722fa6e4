"""Provenance of results: which model, options, text and software produced them."""

from __future__ import annotations

from typing import Any

from tokenmix_core._utils.versions import software
from tokenmix_core.evaluation.efficiency import device_name
from tokenmix_core.evaluation.options import EvalOptions
from tokenmix_core.evaluation.text import corpus_of


def provenance(model: Any, tokenizer: Any, options: EvalOptions, *, reads_text: bool = True) -> dict[str, Any]:
    """Return the provenance of a result as plain data.

    Args:
        model: the model, whose `name_or_path` is its checkpoint.
        tokenizer: the model's tokenizer.
        options: the options of the evaluation; a value of None stands for the suite's own default.
        reads_text: whether to include which text the options name.
    """
    return {
        "checkpoint": getattr(model, "name_or_path", None) or None,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": device_name(model.device),
        "seed": options.seed,
        "limit": options.limit,
        "lengths": None if options.lengths is None else list(options.lengths),
        "corpus": corpus_of(options.text, tokenizer) if reads_text and tokenizer is not None else None,
        **software(),
    }


def training_provenance(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the provenance of a training run's results: values of its `run.json`, and the software of this process."""
    values, identity = manifest["values"], manifest["identity"]
    return {
        "checkpoint": None,
        "dtype": identity["precision"],
        "device": manifest["device"],
        "seed": values["seed"],
        "limit": None,
        "lengths": [values["seq_len"]],
        "corpus": {"fingerprints": identity["data"], "corpora": manifest["corpora"]},
        **software(),
    }
