"""Inputs of mixers that each request gives for itself, such as Oryx' mode, by `vllm_xargs` in its body.

vLLM tells only samplers and logits processors of a request's own parameters. `RequestInputs` is a logits processor that
changes no logits; `--logits-processors` with its name enables these inputs. A request's inputs select kernels on the
host, so vLLM then captures no CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.logits_processor import (  # pyright: ignore[reportMissingImports]
    LogitsProcessor,
    process_dict_updates,
)

from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.registry import find_mixer, known_mixers

# maps the id of vLLM's configuration, which an engine's runner and layers share, to the engine's inputs
_running: WeakValueDictionary[int, RequestInputs] = WeakValueDictionary()


class RequestInputs(LogitsProcessor):
    """A logits processor that holds the mixers' inputs of each request in a batch, by the request's row."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        config = vllm_config.model_config.hf_config
        labels = getattr(config, "labels", ())
        self.takers = _takers([find_mixer(config.mixer_type(i)) for i in range(len(labels))])
        # the values of requests that give none: the configuration's, if it has any
        self.defaults = {name: getattr(config, name, None) for name in self.takers}
        self.rows: dict[int, dict[str, Any]] = {}
        _running[id(vllm_config)] = self

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise a ValueError, which vLLM answers by an error of the request, for an invalid input."""
        takers = _takers([find_mixer(name) for name in known_mixers()])
        for name, value in (sampling_params.extra_args or {}).items():
            if name in takers:
                takers[name].request_input(name, value, 1)

    def update_state(self, batch_update: Any) -> None:
        """Note which requests joined, left or moved."""
        process_dict_updates(self.rows, batch_update, self._inputs_of)

    def _inputs_of(self, params: SamplingParams, prompt: list[int] | None, _: list[int]) -> dict[str, Any]:
        given = self.defaults | {name: x for name, x in (params.extra_args or {}).items() if name in self.takers}
        length = len(prompt or ())
        return {name: taker.request_input(name, given[name], length) for name, taker in self.takers.items()}

    def of_rows(self, rows: Sequence[int], ranges: Sequence[tuple[int, int]]) -> dict[str, Any]:
        """Return the inputs of a call with the tokens of row `rows[i]` at the positions `ranges[i]`, for every i."""
        return {
            name: taker.batch_input(name, [self.rows[i][name] for i in rows], ranges)
            for name, taker in self.takers.items()
        }

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits


def request_inputs(vllm_config: Any) -> RequestInputs | None:
    """Return the inputs of an engine's requests; None if they are not enabled, or no mixer of the model takes any."""
    found = _running.get(id(vllm_config))
    return found if found is not None and found.takers else None


def _takers(mixers: list[type[Mixer]]) -> dict[str, type[Mixer]]:
    return {name: mixer for mixer in mixers for name in mixer.inputs}
