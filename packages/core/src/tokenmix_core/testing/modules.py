"""Tests that hooks and adapters on a model's modules take effect in training, prefill and decoding, or raise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from tokenmix_core.testing.closeness import relative_error

# number of tokens between the prompt's end and the sequence's end; number of decoding steps
BEFORE_END, STEPS = 12, 3


def own_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that own parameters, by name; of several layers with equal mixers, only those of the first."""
    found, kinds = {}, set()
    for name, module in model.named_modules():
        if not any(x is not None for x in module._parameters.values()):
            continue
        layer, _, rest = name.partition("layers.")[2].partition(".")
        mixer: Any = model.get_submodule(f"model.layers.{layer}.mixer") if layer else None
        kind = (type(mixer), str(getattr(mixer, "_parameters", {}).keys()), len(list(mixer.modules())) if mixer else 0)
        if (kind, rest or name) not in kinds:
            kinds.add((kind, rest or name))
            found[name] = module
    return found


class Forms:
    """The uses of a model in `names`: `forms(name)` runs one of them and returns its loss or logits as a vector.

    "evaluation" returns both.

    Args:
        model: a causal language model.
        ids: `[B, T]`.
        inputs: further inputs of each call.
    """

    names = ("training", "evaluation", "prefill", "decoding")

    def __init__(self, model: Any, ids: Tensor, inputs: dict[str, Any]):
        self.model, self.ids, self.inputs = model, ids, inputs
        self.start = ids.shape[1] - BEFORE_END
        with torch.no_grad():
            self.cache = self._cached()[0]

    def __call__(self, name: str) -> Tensor:
        # a fixed seed, so that dropout is equal in all calls
        torch.manual_seed(0)
        self.model.train(name == "training")
        if name == "training":
            return self.model(input_ids=self.ids, labels=self.ids, **self.inputs).loss.view(1)
        with torch.no_grad():
            if name == "prefill":
                return self._cached()[1].flatten()
            if name == "decoding":
                # copy the cache, which was filled before the module was changed
                return torch.cat(list(self._steps(copy.deepcopy(self.cache)))).flatten()
            out = self.model(input_ids=self.ids, labels=self.ids, use_cache=False, **self.inputs)
            return torch.cat((out.loss.view(1), out.logits.flatten()))

    def _cached(self) -> tuple[Any, Tensor]:
        self.model.eval()
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        cache = base.make_cache()
        out = self.model(input_ids=self.ids[:, : self.start], past_key_values=cache, **self.inputs)
        return cache, out.logits

    def _steps(self, cache: Any) -> Iterator[Tensor]:
        for t in range(self.start, self.start + STEPS):
            yield self.model(input_ids=self.ids[:, t : t + 1], past_key_values=cache, **self.inputs).logits


def moved(x: Any, generator: torch.Generator, scale: float = 2.0) -> Any:
    """Return x plus noise whose RMS is `scale` times that of x; x may be a list or tuple, also nested."""
    if isinstance(x, Tensor):
        size = x.detach().double().square().mean().sqrt().item() or 1.0
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        return x + (scale * size * noise).to(x.dtype)
    return type(x)(moved(y, generator, scale) for y in x) if isinstance(x, list | tuple) else x


class ModulesContract:
    """Part of `ModelContract`: a changed module changes the results of training, evaluation, prefill and decoding."""

    inputs: ClassVar[dict] = {}

    def test_a_hook_takes_effect_on_every_module_and_a_weight_on_meta_raises(self, model, ids):
        forms = Forms(model, ids, self.inputs)
        exact = {name: forms(name) for name in forms.names}
        seen = set()
        for path, module in own_modules(model).items():
            for name in forms.names:
                with _changed(module, lambda p: moved(p, torch.Generator().manual_seed(0))):
                    if torch.equal(forms(name), exact[name]):
                        # skip the module: this use of the model does not need it, so a change has no effect
                        continue
                seen.add(path)
                # try changes up to 16 times as large: a small change may move no score across a threshold
                assert any(
                    not torch.equal(_hooked(module, lambda: forms(name), seed), exact[name])  # noqa: B023
                    for seed in range(1, 17)
                ), f"a hook on {path} has no effect in {name}"
                with (
                    _changed(module, lambda p: p.to("meta")),
                    pytest.raises((ValueError, RuntimeError), match=r"device|meta"),
                ):
                    forms(name)
        assert set(own_modules(model)) - seen == set()
        for name, values in exact.items():
            assert torch.equal(forms(name), values), name

    @torch.no_grad()
    def test_a_hook_sees_the_rows_of_a_padded_batch(self, model, ids):
        lengths, tokens = [ids.shape[1], ids.shape[1] - 7, 2], ids.shape[1]
        left = (torch.arange(tokens) >= tokens - torch.tensor(lengths).unsqueeze(1)).long()
        plain = model(ids, attention_mask=left.flip(1), use_cache=False, **self.inputs).logits
        watched = [x for x in model.modules() if x._parameters or x in list(model.model.layers)]
        shape: list[int] = []

        def steer(module: nn.Module, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and list(first.shape[:2]) == shape:
                seen.add(module)
                moved = first.clone()
                moved[:, -1] += 0.1
                return (moved, *output[1:]) if isinstance(output, tuple) else moved
            return None

        def call(row: Any, mask: Tensor | None) -> Tensor:
            shape[:] = row.shape
            return model(row, attention_mask=mask, use_cache=False, **self.inputs).logits

        seen: set[nn.Module] = set()
        handles = [module.register_forward_hook(steer) for module in watched]
        alone = [call(ids[i : i + 1, -n:], None)[0] for i, n in enumerate(lengths)]
        of_single_rows, seen = seen, set()
        together = call(ids, left)
        assert seen == of_single_rows
        right = call(ids, left.flip(1))
        for handle in handles:
            handle.remove()
        for i, n in enumerate(lengths):
            assert relative_error(together[i, -n:], alone[i]) < 1e-4, n
            # in a padded row, the hook has changed only the last position, which is padding after the tokens compared
            assert n == tokens or relative_error(right[i, :n], plain[i, :n]) < 1e-4, n

    @torch.no_grad()
    def test_each_row_of_a_padded_batch_has_its_own_adapter(self, model, ids):
        peft = pytest.importorskip("peft")
        linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
        names = [name for name in linear if name != "lm_head"]
        config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
        adapted = peft.get_peft_model(copy.deepcopy(model), config, adapter_name="a").eval()
        adapted.add_adapter("b", config)
        lengths, tokens, chosen = [ids.shape[1], ids.shape[1] - 7, 2], ids.shape[1], ["a", "b", "a"]
        left = (torch.arange(tokens) >= tokens - torch.tensor(lengths).unsqueeze(1)).long()
        given = {"use_cache": False, **self.inputs}
        together = adapted(input_ids=ids, attention_mask=left, adapter_names=chosen, **given).logits
        for i, (n, name) in enumerate(zip(lengths, chosen, strict=True)):
            adapted.set_adapter(name)
            alone = adapted(input_ids=ids[i : i + 1, -n:], **given).logits[0]
            assert relative_error(together[i, -n:], alone) < 1e-4, name

    def test_adapters_on_every_linear_layer_take_effect_and_merge(self, model, ids):
        peft = pytest.importorskip("peft")
        # untie the weights: merging the head's adapter into a tied weight would also change the embedding
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
        config = peft.LoraConfig(r=2, target_modules=names, init_lora_weights=False)
        self._adapted_as_merged(peft, config, model, ids)

    def test_tuned_norms_take_effect_and_merge(self, model, ids):
        peft = pytest.importorskip("peft")
        names = [name for name, module in model.named_modules() if type(module).__name__.endswith("Norm")]
        self._adapted_as_merged(peft, peft.LNTuningConfig(target_modules=names), model, ids)

    def _adapted_as_merged(self, peft: Any, config: Any, model: Any, ids: Tensor) -> None:
        base = Forms(model, ids, self.inputs)
        exact = {name: base(name).detach() for name in base.names}
        base("training").sum().backward()
        # modules without a gradient in the base model, such as gates of a layer whose window covers all tokens
        idle = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
        adapted = peft.get_peft_model(copy.deepcopy(model), config)
        learned = [(name, p) for name, p in adapted.named_parameters() if p.requires_grad]
        with torch.no_grad():
            for _, p in learned:
                p.copy_(moved(p, torch.Generator().manual_seed(2)))
        forms = Forms(adapted, ids, self.inputs)
        forms("training").sum().backward()
        without = [name for name, p in learned if p.grad is None or not p.grad.any()]
        assert [name for name in without if not any(f".{module}." in name for module in idle)] == []
        merged = Forms(copy.deepcopy(adapted).merge_and_unload(), ids, self.inputs)
        for name in base.names:
            found = forms(name).detach()
            error = relative_error(found, merged(name).detach())
            assert error < 1e-4, name
            assert relative_error(found, exact[name]) > 10 * error, name


def _hooked(module: nn.Module, call: Callable[[], Tensor], seed: int) -> Tensor:
    """Return the result of `call` while a hook adds noise to the module's output; a larger `seed` adds more noise."""
    calls: list[int] = []

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        calls.append(1)
        return moved(output, torch.Generator().manual_seed(seed), scale=2.0 * seed)

    handle = module.register_forward_hook(hook)
    try:
        found = call()
    finally:
        handle.remove()
    assert calls, "the module is not called"
    return found


@contextmanager
def _changed(module: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context manager inside which `change` is applied to the module's own parameters."""
    before = dict(module._parameters)
    module._parameters.update(
        {name: p if p is None else nn.Parameter(change(p.detach())) for name, p in before.items()}
    )
    try:
        yield
    finally:
        module._parameters.update(before)
