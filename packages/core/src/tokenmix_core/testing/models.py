"""Tests for every model family; test classes inherit them."""

from __future__ import annotations

import copy
import random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from tokenmix_core.modeling import HybridConfig, HybridForCausalLM, HybridModel
from tokenmix_core.testing.caches import CacheContract
from tokenmix_core.testing.checkpoints import CheckpointContract
from tokenmix_core.testing.closeness import relative_error
from tokenmix_core.testing.fake_cuda_graph import graphs_everywhere
from tokenmix_core.testing.lengths import LengthsContract
from tokenmix_core.testing.mixers import addresses, random_parts
from tokenmix_core.testing.modules import ModulesContract
from tokenmix_core.testing.residual import ResidualContract
from tokenmix_core.testing.rollback import RollbackContract
from tokenmix_core.testing.schedules import ScheduleContract
from tokenmix_core.testing.serving import ServingContract
from tokenmix_core.testing.tracing import CountedGraphs, by_kernels
from tokenmix_core.training.cuda_graph import GraphedStep, Losses


def logits_in_parts(model, ids: Tensor, parts: list[int], mask: Tensor | None = None, **inputs) -> Tensor:
    """Return the logits for sequences that are passed to the model in parts of the given lengths, with a cache."""
    cache, outputs, start = model.make_cache(), [], 0
    for part in ids.split(parts, 1):
        start += part.shape[1]
        seen = None if mask is None else mask[:, :start]
        outputs.append(model(part, attention_mask=seen, past_key_values=cache, **inputs).logits)
    return torch.cat(outputs, 1)


def left_padded(lengths: list[int], tokens: int) -> Tensor:
    """Return an attention mask `[B, tokens]` with `lengths[i]` tokens in row i, behind its padding."""
    return (torch.arange(tokens) >= tokens - torch.tensor(lengths).unsqueeze(1)).long()


class ModelContract(
    CacheContract,
    CheckpointContract,
    ModulesContract,
    ResidualContract,
    LengthsContract,
    RollbackContract,
    ServingContract,
    ScheduleContract,
):
    """Tests of a model family. A subclass `TestX(ModelContract)` sets `configs`.

    Attributes:
        configs: fields of tiny configurations, by name: few layers, and a vocabulary of at least 50.
        config_class, model_class, causal_lm_class: the classes of the family.
        inputs: further inputs that every call passes to the model.
        tokens: length of the test sequences; exceeds all windows in the configurations.
        traced: fields of tiny configurations, by name, that torch.compile traces as on a GPU. Together they have all
            kinds of mixers, with head sizes that kernels support.
    """

    configs: ClassVar[dict[str, dict[str, Any]]] = {}
    traced: ClassVar[dict[str, dict[str, Any]]] = {}
    config_class: ClassVar[type[HybridConfig]] = HybridConfig
    model_class: ClassVar[type[HybridModel]] = HybridModel
    causal_lm_class: ClassVar[type[HybridForCausalLM]] = HybridForCausalLM
    inputs: ClassVar[dict] = {}
    tokens: ClassVar[int] = 19

    def pytest_generate_tests(self, metafunc):
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", sorted(self.configs), scope="class")
        if "traced_case" in metafunc.fixturenames:
            metafunc.parametrize("traced_case", sorted(self.traced))

    @pytest.fixture
    def config(self, case) -> HybridConfig:
        return self.config_class(**self.configs[case])

    @pytest.fixture
    def model(self, config) -> HybridForCausalLM:
        torch.manual_seed(0)
        model = self.causal_lm_class(config).eval()
        # initial weights larger than usual, so that an error in one layer changes the logits clearly
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("proj.weight"):
                    p.mul_(5)
        return model

    @pytest.fixture
    def ids(self, config) -> Tensor:
        return torch.randint(3, config.vocab_size, (3, self.tokens), generator=torch.Generator().manual_seed(1))

    @torch.no_grad()
    def test_any_split_gives_what_the_whole_gives(self, model, ids):
        whole, rng = model(ids, use_cache=False, **self.inputs).logits, random.Random(0)
        for parts in ([1] * self.tokens, random_parts(self.tokens, rng), random_parts(self.tokens, rng)):
            assert relative_error(logits_in_parts(model, ids, parts, **self.inputs), whole) < 1e-4, parts

    # with 4, every row begins with at least four padding tokens, so that the first parts of a split can be only padding
    @pytest.mark.parametrize("padded_everywhere", [0, 4])
    @torch.no_grad()
    def test_padding_changes_nothing_in_any_split(self, model, ids, padded_everywhere):
        lengths, rng = [self.tokens - padded_everywhere, self.tokens - 7, 2], random.Random(1)
        mask = left_padded(lengths, self.tokens)
        alone = [model(ids[i : i + 1, -n:], use_cache=False, **self.inputs).logits[0] for i, n in enumerate(lengths)]
        splits = [[self.tokens], [1] * self.tokens, random_parts(self.tokens, rng), random_parts(self.tokens, rng)]
        for parts in splits:
            padded = logits_in_parts(model, ids, parts, mask, **self.inputs)
            for row, n, exact in zip(padded, lengths, alone, strict=True):
                assert relative_error(row[-n:], exact) < 1e-4, (parts, n)
        right = model(ids, attention_mask=mask.flip(1), use_cache=False, **self.inputs).logits
        for i, n in enumerate(lengths):
            exact = model(ids[i : i + 1, :n], use_cache=False, **self.inputs).logits[0]
            assert relative_error(right[i, :n], exact) < 1e-4, n

    @torch.no_grad()
    def test_packed_sequences_do_not_see_each_other(self, model, ids):
        cu_seqlens = torch.tensor([0, 5, 5, self.tokens], dtype=torch.int32)
        packed = model(ids[:1], cu_seqlens=cu_seqlens, **self.inputs).logits
        apart = [model(part, use_cache=False, **self.inputs).logits for part in ids[:1].split([5, self.tokens - 5], 1)]
        assert relative_error(packed, torch.cat(apart, 1)) < 1e-4

    def test_padding_behind_packed_sequences_has_no_influence(self, model, ids):
        last, found = self.tokens - 3, []
        for name in ("cu_seqlens", "cu_seq_lens_q"):
            for stop in (last, self.tokens):
                model.zero_grad()
                given = {name: torch.tensor([0, 5, 5, last], dtype=torch.int32)}
                out = model(ids[:1, :stop], labels=ids[:1, :stop], **given, **self.inputs)
                out.loss.backward()
                found.append((out.loss, out.logits[:, :last], [p.grad for p in model.parameters()]))
        for loss, logits, grads in found[1:]:
            torch.testing.assert_close(loss, found[0][0])
            assert relative_error(logits, found[0][1]) < 1e-4
            for grad, wanted in zip(grads, found[0][2], strict=True):
                assert wanted is None or relative_error(grad, wanted) < 1e-3

    @torch.no_grad()
    def test_documents_are_told_apart_in_every_form_of_their_boundaries(self, model, ids):
        parts = ids[:1].split([5, 1, self.tokens - 6], 1)
        apart = torch.cat([model(part, use_cache=False, **self.inputs).logits for part in parts], 1)
        boundaries = torch.tensor([0, 5, 6, self.tokens], dtype=torch.int32)
        positions = torch.cat([torch.arange(part.shape[1]) for part in parts]).unsqueeze(0)
        index = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), boundaries.diff()).unsqueeze(0)
        longest = {"max_length_q": self.tokens - 6, "max_length_k": self.tokens - 6}
        for given in (
            {"position_ids": positions},
            {"position_ids": positions, "attention_mask": torch.ones_like(positions), "use_cache": False},
            {"position_ids": positions + 2, "seq_idx": index},
            {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries.clone(), **longest},
            {"position_ids": positions, "cu_seq_lens_q": boundaries, "seq_idx": index},
        ):
            assert relative_error(model(ids[:1], **given, **self.inputs).logits, apart) < 1e-4, list(given)

    @torch.no_grad()
    def test_documents_are_refused_where_they_would_see_each_other(self, model, ids):
        positions = torch.cat((torch.arange(5), torch.arange(self.tokens - 5))).unsqueeze(0)
        padded = left_padded([self.tokens - 2], self.tokens)
        for given in (
            {"input_ids": ids, "position_ids": positions},
            {"input_ids": ids[:1], "position_ids": positions, "use_cache": True},
            {"input_ids": ids[:1], "position_ids": positions, "past_key_values": model.make_cache()},
            {"input_ids": ids[:1], "position_ids": positions, "attention_mask": padded},
        ):
            with pytest.raises(ValueError, match=r"position_ids that restart inside a row are documents"):
                model(**given, **self.inputs)

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    @torch.no_grad()
    def test_a_call_that_was_stopped_leaves_no_cache_to_go_on_with(self, model, ids, error):
        whole = model(ids, use_cache=False, **self.inputs).logits
        stopped = [*list(model.model.layers)[1:], model.model.norm, model.lm_head]

        def stop(*_):
            raise error

        for module in stopped:
            cache = model.make_cache()
            model(ids[:, :5], past_key_values=cache, **self.inputs)
            handle = module.register_forward_pre_hook(stop)
            with pytest.raises(error):
                model(ids[:, 5:], past_key_values=cache, **self.inputs)
            handle.remove()
            for use in (
                lambda cache: model(ids[:, 5:], past_key_values=cache, **self.inputs),
                lambda cache: cache.reorder_cache(torch.tensor([0])),
            ):
                with pytest.raises(ValueError, match="the cache is broken"):
                    use(cache)
            cache.reset()
            assert relative_error(model(ids, past_key_values=cache, **self.inputs).logits, whole) < 1e-4

    @torch.no_grad()
    def test_a_refused_call_leaves_the_cache_as_it_was(self, model, ids):
        whole, cache = model(ids, use_cache=False, **self.inputs).logits, model.make_cache()
        for at, part in ((0, ids[:, :5]), (5, ids[:, 5:])):
            for wrong in (
                {"attention_mask": torch.ones(3, 99)},
                {"position_ids": torch.zeros(3, 99, dtype=torch.long)},
                {"position_ids": torch.zeros_like(part)},
            ):
                with pytest.raises(ValueError, match=r"must have shape|restart"):
                    model(part, past_key_values=cache, **wrong, **self.inputs)
            logits = model(part, past_key_values=cache, **self.inputs).logits
            assert relative_error(logits, whole[:, at : at + part.shape[1]]) < 1e-4

    @torch.no_grad()
    def test_the_declared_bytes_are_the_bytes_held(self, model, ids):
        for parts in ([self.tokens], [1] * self.tokens):
            cache = model.make_cache()
            for part in ids.split(parts, 1):
                model(part, past_key_values=cache, **self.inputs)
            least, most = model.state_bounds(self.tokens, len(ids), torch.float32)
            assert least <= cache.nbytes <= most

    @pytest.mark.parametrize(
        "options",
        [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 20}],
        ids=["greedy", "beams", "sampling"],
    )
    def test_generation_with_a_cache_gives_what_it_gives_without(self, model, ids, options):
        mask = left_padded([self.tokens, self.tokens - 7, 2], self.tokens)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **self.inputs, **options}
        outputs = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            outputs.append(model.generate(ids, attention_mask=mask, use_cache=use_cache, **options))
        assert torch.equal(*outputs)

    @torch.no_grad()
    def test_captured_steps_give_what_the_whole_gives(self, model, ids):
        prompt, lengths = self.tokens // 3, [self.tokens, self.tokens - 2, self.tokens - self.tokens // 3 + 1]
        mask = left_padded(lengths, self.tokens)
        alone = [model(ids[i : i + 1, -n:], use_cache=False, **self.inputs).logits[0] for i, n in enumerate(lengths)]
        cache, logits = model.make_cache(), []
        model(ids[:, :prompt], attention_mask=mask[:, :prompt], past_key_values=cache, **self.inputs)
        with graphs_everywhere(), model.decoding(cache, graph=True):
            for t in range(prompt, self.tokens):
                out = model(ids[:, t : t + 1], past_key_values=cache, **self.inputs)
                logits.append(out.logits.clone())
                if t == prompt:
                    before = addresses(cache)
            assert any(cache.steps.captured.graphs.values())
            assert addresses(cache) == before
        assert not cache.fixed
        for row, exact in zip(torch.cat(logits, 1), alone, strict=True):
            assert relative_error(row, exact[prompt - self.tokens :]) < 1e-4

    @pytest.mark.parametrize(
        "options",
        [{"num_beams": 2}, {"do_sample": True, "top_k": 20, "repetition_penalty": 1.2, "eos_token_id": [7, 8, 9]}],
        ids=["beams", "sampling"],
    )
    def test_captured_generation_gives_the_same_tokens(self, model, ids, options):
        mask = left_padded([self.tokens, self.tokens - 7, 2], self.tokens)
        options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, **self.inputs, **options}
        outputs = []
        for captured in (False, True):
            torch.manual_seed(3)
            with graphs_everywhere():
                outputs.append(model.generate(ids, attention_mask=mask, decoding_graph=captured, **options))
        assert torch.equal(*outputs)
        assert len(model.step_store) == 1

    def test_generation_continues_from_a_cache(self, model, ids):
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, **self.inputs}
        cache = model.make_cache()
        with torch.no_grad():
            model(ids[:1, :-4], past_key_values=cache, **self.inputs)
        assert torch.equal(
            model.generate(ids[:1], past_key_values=cache, **options), model.generate(ids[:1], **options)
        )

    def test_training_reaches_every_parameter_with_and_without_checkpointing(self, model, ids):
        gradients = []
        for checkpointing in (False, True):
            if checkpointing:
                model.gradient_checkpointing_enable()
            model.train().zero_grad()
            out = model(ids, labels=ids, **self.inputs)
            assert out.logits is None
            out.loss.backward()
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        for name, exact in gradients[0].items():
            assert exact.isfinite().all(), name
            assert exact.any(), name
            assert relative_error(gradients[1][name], exact) < 1e-5, name

    def test_gradients_of_each_example_are_those_of_single_calls(self, model, ids):
        """Test that `torch.func` computes gradients of the loss for each example separately."""
        model.eval()

        def loss(parameters: dict, row: Tensor) -> Tensor:
            inputs = {"input_ids": row[None], "labels": row[None], "use_cache": False, **self.inputs}
            return torch.func.functional_call(model, parameters, (), inputs).loss

        parameters = {name: x.detach() for name, x in model.named_parameters()}
        found = torch.vmap(torch.func.grad(loss), (None, 0), randomness="same")(parameters, ids)
        for i, row in enumerate(ids):
            model.zero_grad()
            model(row[None], labels=row[None], use_cache=False, **self.inputs).loss.backward()
            for name, x in model.named_parameters():
                exact = torch.zeros_like(x) if x.grad is None else x.grad
                assert (found[name][i] - exact).norm() < 1e-4 * exact.norm() + 1e-6, name

    def test_training_by_captured_passes_equals_eager_training(self, model, ids):
        losses, weights = [], []
        for captured in (False, True):
            learner = copy.deepcopy(model).train()
            optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)

            def passes(inputs, items, learner=learner):
                out = learner(**inputs, num_items_in_batch=items)
                out.loss.backward()
                terms = {k: v.detach().sum() for k, v in (out.auxiliary or {}).items() if k.endswith("_loss")}
                return Losses(out.loss.detach(), terms)

            # `eager` permits copies of values between tensors and Python: the emulator captures PyTorch's operations,
            # some of which make such copies; a CUDA graph captures kernels, which make none
            with graphs_everywhere(eager=True):
                make = GraphedStep(learner, ids.device) if captured else lambda passes, *given: passes(*given)
            generator, seen = torch.Generator().manual_seed(0), []
            torch.manual_seed(0)
            # each optimizer step has three micro-batches; from the second step on, all passes are captured or replayed
            for i in range(12):
                row = ids[:, torch.randperm(ids.shape[1], generator=generator)]
                found = make(passes, {"input_ids": row, "labels": row, **self.inputs}, torch.tensor(100 + i))
                seen.append([found.loss.clone(), *(x.clone() for x in found.auxiliary.values())])
                if i % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(seen)
            weights.append([*learner.parameters(), *learner.buffers()])
        assert isinstance(make, GraphedStep)
        assert sum(x is not None for x in make.graphs.values()) == 2, "the first of an update, and the others"
        assert losses[0] == losses[1]
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))

    @torch.no_grad()
    def test_the_loss_is_the_mean_over_predicted_tokens(self, model, ids):
        labels = ids.clone()
        labels[0, :4] = -100
        out = model(ids, labels=labels, **self.inputs)
        exact = torch.nn.functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1).double(), labels[:, 1:].flatten(), ignore_index=-100
        )
        extra = sum(v.sum() for k, v in (out.auxiliary or {}).items() if k.endswith("_loss"))
        count = (labels[:, 1:] != -100).sum()
        assert abs(out.loss.double() - exact - extra / count) < 1e-5 * exact
        assert abs(model(ids, labels=labels, num_items_in_batch=7, **self.inputs).loss * 7 / count - out.loss) < 1e-4
        nothing = torch.full_like(labels, -100)
        assert abs(model(ids, labels=nothing, num_items_in_batch=torch.tensor(0), **self.inputs).loss - extra) < 1e-5

    @pytest.mark.parametrize("form", ["packed", "padded"])
    def test_one_graph_serves_all_lengths_and_counts_of_documents(self, traced_case, form):
        torch.compiler.reset()
        model = by_kernels(self.causal_lm_class(self.config_class(**self.traced[traced_case])))
        # models are not trained on padded batches, because auxiliary losses of mixers cannot leave padding out
        training = form != "padded"
        graphs = CountedGraphs()
        compiled = torch.compile(model.train(training), fullgraph=True, backend=graphs)
        for tokens, documents in ((self.tokens, 3), (self.tokens + 50, 5)):
            ids = torch.randint(3, model.config.vocab_size, (1 if form == "packed" else 2, tokens))
            given: dict[str, Tensor] = {"labels": ids} if training else {}
            if form == "packed":
                given["cu_seqlens"] = torch.linspace(0, tokens, documents + 1).to(torch.int32)
            elif form == "padded":
                given["attention_mask"] = left_padded([tokens, 2], tokens)
            for name, x in [("ids", ids), *given.items()]:
                torch._dynamo.mark_dynamic(x, 0 if name == "cu_seqlens" else 1)
            with torch.set_grad_enabled(training):
                out = compiled(ids, **given, **self.inputs, use_cache=False)
            if training:
                out.loss.backward()
        assert graphs.made == 1
