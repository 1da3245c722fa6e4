"""Models with equal parameter counts, or also equal state sizes, built from the contestants' layers."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from arena import rules
from arena.contestants import CONTESTANTS, PARAMETERS, STATE, Contestant, Fields
from arena.sizes import Size
from tokenmix_core.nn.mlp import swiglu_width
from tokenmix_core.training.recipe import Recipe

# maximum relative difference of parameter count, or state size, between a model and the contestant REFERENCE
TOLERANCE = {PARAMETERS: rules.PARAMETER_TOLERANCE, STATE: rules.STATE_TOLERANCE}
REFERENCE = {PARAMETERS: "attention", STATE: "oryx-tm"}


@dataclass(frozen=True)
class Model:
    """The model of a contestant in a division (equal parameter counts, or also equal state sizes).

    Attributes:
        fields: the configuration, without vocabulary size and context length.
        parameters: parameter count without the embedding, which is equal in all models; for Oryx, it includes both
            modes.
        state_bytes: minimum and maximum bytes of the state of one sequence at the longest context of the text task, in
            bfloat16. They differ if the data decide which tokens are retained, or if a part of the state may be
            dropped.
    """

    fields: Fields = field(hash=False)
    parameters: int
    state_bytes: tuple[int, int]


@cache
def solve(name: str, division: str, size: Size) -> Model:
    """Return a contestant's model whose parameters and, in the division `STATE`, state match `REFERENCE`'s in size.

    In the division `STATE`, the layers are the contestant's candidate whose state is nearest in size. The width of the
    MLPs then makes the numbers of parameters match: the number is linear in this width, so that two models on the meta
    device determine it.

    Raises:
        ValueError: the contestant is not in the division, or no width or candidate comes within the tolerance.
    """
    contestant = CONTESTANTS[name]
    if not contestant.eligible(division):
        raise ValueError(f"{name} does not take part in the division {division!r}")
    fields = dict(contestant.layers(size))
    if division == STATE:
        fields = _nearest_candidate(contestant, size)
    target, multiple = target_parameters(size), size.mlp_multiple
    low, high = (_count_parameters(contestant, size, {**fields, "intermediate_size": n * multiple}) for n in (1, 2))
    multiples = 1 + round((target - low) / (high - low))
    if multiples < 1:
        raise ValueError(f"{name}: its mixers alone have {low:,} parameters, more than the reference's {target:,}")
    fields["intermediate_size"] = multiples * multiple
    parameters = _count_parameters(contestant, size, fields)
    if abs(parameters / target - 1) > TOLERANCE[PARAMETERS]:
        raise ValueError(f"{name}: {parameters:,} parameters are not equal to {target:,}; lower mlp_multiple")
    return Model(fields, parameters, state_bytes(contestant, size, fields))


@cache
def target_parameters(size: Size) -> int:
    """Return the parameter count that all models should have, that of `REFERENCE[PARAMETERS]`."""
    reference = CONTESTANTS[REFERENCE[PARAMETERS]]
    mlp = {"intermediate_size": swiglu_width(size.width, multiple=64)}
    return _count_parameters(reference, size, {**reference.layers(size), **mlp})


@cache
def target_state(size: Size) -> int:
    """Return the bytes of state that models in the division `STATE` should have, those of `REFERENCE[STATE]`."""
    reference = CONTESTANTS[REFERENCE[STATE]]
    assert reference.candidates is not None
    return state_bytes(reference, size, next(reference.candidates(size)))[0]


def state_bytes(contestant: Contestant, size: Size, fields: Fields, length: int | None = None) -> tuple[int, int]:
    """Return the minimum and maximum bytes of the state of one sequence, in bfloat16.

    The maximum includes the parts that the contestant may drop, the minimum does not. By default, `length` is that of
    the longest sequence in the text task, at which every bounded state is full.
    """
    length = length or size.eval_length_factor * size.seq_len
    model = _meta_model(contestant, size, {**fields, "intermediate_size": size.mlp_multiple})
    bounds = model.state_bounds(length, 1, torch.bfloat16)
    dropped = sum(
        mixer.make_state().parts[name].bounds(length, 1, torch.bfloat16).most
        for mixer in model.model.mixers
        for name in contestant.droppable
    )
    return bounds.least - dropped, bounds.most


def with_model(recipe: Recipe, contestant: Contestant, division: str, size: Size) -> Recipe:
    """Return the recipe with the model, row inputs and callbacks of a contestant."""
    model = _shared_fields(size) | dict(recipe.model) | dict(solve(contestant.name, division, size).fields)
    return replace(
        recipe,
        model=model,
        model_type=contestant.model_type,
        row_inputs=contestant.row_inputs,
        callbacks=contestant.callbacks + recipe.callbacks,
    )


def _shared_fields(size: Size) -> dict[str, Any]:
    return {"vocab_size": size.recall_vocab_size, "hidden_size": size.width, "num_hidden_layers": size.layers}


def _meta_model(contestant: Contestant, size: Size, fields: Fields) -> Any:
    recipe = Recipe("arena", "", model=_shared_fields(size) | dict(fields), model_type=contestant.model_type)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(recipe.model_config())


def _count_parameters(contestant: Contestant, size: Size, fields: Fields) -> int:
    return _meta_model(contestant, size, fields).num_parameters(exclude_embeddings=True)


def _nearest_candidate(contestant: Contestant, size: Size) -> dict[str, Any]:
    assert contestant.candidates is not None
    target, candidates = target_state(size), list(contestant.candidates(size))

    @cache
    def bytes_of(i: int) -> int:
        return state_bytes(contestant, size, candidates[i])[0]

    # bisection works because states grow from one candidate to the next
    above = bisect_left(range(len(candidates)), target, key=bytes_of)
    neighbours = [i for i in (above - 1, above) if 0 <= i < len(candidates)]
    best = min(neighbours, key=lambda i: abs(bytes_of(i) - target))
    if (error := abs(bytes_of(best) / target - 1)) > TOLERANCE[STATE]:
        raise ValueError(
            f"{contestant.name}: no candidate has a state of {target:,} bytes; the nearest differs by {error:.1%}"
        )
    return dict(candidates[best])
