"""Test CUDA graphs of training: losses and weights equal those of eager passes, and the right passes are captured."""

import copy
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from runs import (
    HYBRID,
    Processes,
    adaptation,
    curve,
    penalised_model,
    recipe,
    run,
    train_with_graphs,
    weights,
)
from transformers import AutoModelForCausalLM, TrainerCallback

from tokenmix_core.kernels.launch import cuda_graphs
from tokenmix_core.modeling import HybridConfig, HybridForCausalLM
from tokenmix_core.testing.fake_cuda_graph import HostRead, assert_graphs_train_alike, capture_work, graphs_everywhere
from tokenmix_core.training import engine
from tokenmix_core.training.cuda_graph import MOST, GraphedStep, Losses
from tokenmix_core.training.recipe import Tokens
from tokenmix_core.training.trainer import train


@pytest.fixture
def captured():
    """Return the captured passes in order; training captures graphs on this device."""
    with graphs_everywhere(eager=True) as works:
        yield works


def same(folder, other) -> bool:
    a, b = weights(folder), weights(other)
    return curve(folder) == curve(other) and all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("micro", [128, 64, 32])
def test_a_run_with_graphs_equals_an_eager_run(micro, corpus, captured, tmp_path):
    # with loss terms whose weights follow what layers observe
    changes = {"model": penalised_model(), "callbacks": (adaptation,), "documents": "joined", "save_steps": 8}
    changes["micro_batch_tokens"] = micro
    train(recipe(corpus, training_graph="never", **changes), tmp_path / "plain", progress=False)
    train(recipe(corpus, training_graph="always", **changes), tmp_path / "captured", progress=False)
    assert same(tmp_path / "captured", tmp_path / "plain")
    assert len(captured) == (1 if micro == 128 else 2), "the first micro-batch of an update, and the others"


class StopAfter(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_save = control.should_training_stop = state.global_step == 5


def test_a_resumed_run_equals_an_uninterrupted_run(corpus, captured, tmp_path):
    changes = {"documents": "joined", "micro_batch_tokens": 64, "training_graph": "always"}
    train(recipe(corpus, **changes), tmp_path / "whole", progress=False)
    stopped = recipe(corpus, callbacks=(lambda _: StopAfter(),), **changes)
    assert train(stopped, tmp_path / "cut", progress=False).step == 5
    assert train(recipe(corpus, **changes), tmp_path / "cut", resume=True, progress=False).step == 8
    assert same(tmp_path / "cut", tmp_path / "whole")
    # a checkpoint does not depend on graphs
    shutil.rmtree(tmp_path / "cut")
    train(stopped, tmp_path / "cut", progress=False)
    train(recipe(corpus, **{**changes, "training_graph": "never"}), tmp_path / "cut", resume=True, progress=False)
    assert same(tmp_path / "cut", tmp_path / "whole")


@pytest.mark.skipif(torch.cuda.is_available(), reason="several processes share no GPU")
@pytest.mark.parametrize(("micro", "fsdp"), [(64, False), (32, False), (32, True)])
def test_ranks_with_graphs_train_as_ddp_does(micro, fsdp, corpus, tmp_path):
    # one or two micro-batches a step on each rank
    changes = {"model": penalised_model(), "callbacks": (adaptation,), "documents": "joined"}
    changes["micro_batch_tokens"] = micro
    run(2, recipe(corpus, training_graph="never", **changes), tmp_path / "ddp")
    made = recipe(corpus, training_graph="always", fsdp=fsdp, fsdp_reshard="never", **changes)
    assert Processes(2, train_with_graphs, made, tmp_path / "captured", progress=False).join() == [0, 0]
    for rank in (0, 1):
        count = int((tmp_path / "captured" / f"captured-{rank}").read_text())
        assert count == (1 if micro == 64 else 2)
    if not fsdp:
        assert same(tmp_path / "captured", tmp_path / "ddp")
    # FSDP2 adds up the norm of gradients by shards
    for step, values in curve(tmp_path / "ddp").items():
        assert curve(tmp_path / "captured")[step] == pytest.approx(values, rel=2e-5), f"step {step}"


class Evaluating(TrainerCallback):
    def on_step_end(self, args, state, control, *, model, **_):
        model.eval()


def test_evaluation_during_training_needs_no_new_graph(corpus, captured, tmp_path):
    changes = {"documents": "joined", "micro_batch_tokens": 64}
    train(recipe(corpus, training_graph="never", **changes), tmp_path / "plain", progress=False)
    changes |= {"callbacks": (lambda _: Evaluating(),), "training_graph": "always"}
    train(recipe(corpus, **changes), tmp_path / "evaluated", progress=False)
    assert len(captured) == 2
    assert same(tmp_path / "evaluated", tmp_path / "plain")


class Hooked(TrainerCallback):
    def __init__(self):
        self.calls = 0

    def on_train_begin(self, args, state, control, *, model, **_):
        model.register_forward_hook(lambda *_: setattr(self, "calls", self.calls + 1))


def test_a_model_that_cannot_be_captured_warns_once_and_trains(corpus, captured, tmp_path, monkeypatch):
    changes = {"documents": "joined", "training_graph": "always"}
    hooked = Hooked()
    with pytest.warns(UserWarning, match="hooks") as caught:
        train(recipe(corpus, callbacks=(lambda _: hooked,), **changes), tmp_path / "hooked", progress=False)
    assert sum("without CUDA graphs" in str(w.message) for w in caught) == 1
    assert hooked.calls == 8
    assert not captured

    monkeypatch.setattr(cuda_graphs, "capture_on", lambda device: None)
    with pytest.warns(UserWarning, match="no graphs on"):
        train(recipe(corpus, **changes), tmp_path / "none", progress=False)
    assert same(tmp_path / "none", tmp_path / "hooked")


def test_passes_that_read_from_the_device_end_a_run_with_what_to_do(corpus, tmp_path, monkeypatch):
    # the eager forms of operations read the boundaries of documents
    monkeypatch.setattr(cuda_graphs, "capture_on", lambda device: fails)

    def fails(work):
        try:
            return capture_work(work)
        except HostRead as error:
            raise RuntimeError(f"operation not permitted: {error}") from error

    with pytest.raises(RuntimeError, match=r"cannot be captured .*not permitted.*train with training_graph='never'"):
        train(recipe(corpus, training_graph="always"), tmp_path / "run", progress=False)


def test_auto_captures_layers_that_a_cpu_launches_too_slowly(corpus, captured, tmp_path, monkeypatch):
    changes = {"documents": "joined", "micro_batch_tokens": 64}
    train(recipe(corpus, **changes), tmp_path / "small", progress=False)
    assert len(captured) == 2
    for name, owner, attribute, value, said in (
        ("large layers", engine, "_LAUNCH_BOUND_FLOPS", 1.0, nullcontext()),
        ("little memory", cuda_graphs, "at_most_half_used", lambda _: False, pytest.warns(match="more memory")),
    ):
        with monkeypatch.context() as patch, said:
            patch.setattr(owner, attribute, value)
            train(recipe(corpus, **changes), tmp_path / name, progress=False)
        assert same(tmp_path / name, tmp_path / "small"), name
    checkpointing = recipe(corpus, gradient_checkpointing=True, **changes)
    other = replace(recipe(corpus, **changes), make_model=lambda _: learners()[0])
    for i, made in enumerate((checkpointing, other)):
        train(made, tmp_path / str(i), progress=False)
    assert len(captured) == 2


@pytest.mark.parametrize("micro", [128, 64])
def test_auto_continues_if_capture_fails(micro, corpus, tmp_path, monkeypatch):
    changes = {"documents": "joined", "micro_batch_tokens": micro}
    train(recipe(corpus, training_graph="never", **changes), tmp_path / "plain", progress=False)

    def fails(work):
        # a failed capture leaves gradients that contain no values
        capture_work(work, eager=True)
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(cuda_graphs, "capture_on", lambda device: fails)
    with pytest.warns(UserWarning, match="kernel by kernel.*out of memory") as caught:
        train(recipe(corpus, **changes), tmp_path / "run", progress=False)
    assert sum("kernel by kernel" in str(w.message) for w in caught) == 1
    assert same(tmp_path / "run", tmp_path / "plain")


def test_gradients_that_a_first_micro_batch_has_not_are_refused():
    class Branches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x, *, both):
            return (self.a(x) + (self.b(x) if both else 0)).sum()

    model = Branches()

    def passes(inputs, items):
        loss = model(**inputs)
        loss.backward()
        return Losses(loss.detach(), {})

    with graphs_everywhere():
        make = GraphedStep(model, torch.device("cpu"))

    def update():
        model.zero_grad()
        for both in (False, True):
            make(passes, {"x": torch.randn(2, 4), "both": both}, None)

    update()
    # only now does the second micro-batch add to gradients that a repeat made
    update()
    with pytest.raises(RuntimeError, match="that others give none"):
        update()


@pytest.mark.parametrize("other", ["torch_compile", "gradient_checkpointing"])
def test_a_recipe_names_what_does_not_go_with_it(other, corpus):
    with pytest.raises(ValueError, match=f"training_graph='always' does not go with {other}"):
        recipe(corpus, training_graph="always", **{other: True})


def passes_of(model):
    def passes(inputs, items):
        loss = model(**inputs, num_items_in_batch=items).loss
        loss.backward()
        return Losses(loss.detach(), {})

    return passes


def learners():
    torch.manual_seed(0)
    model = HybridForCausalLM(HybridConfig(**HYBRID)).train()
    return model, copy.deepcopy(model)


def given(tokens, seed):
    ids = torch.randint(0, 264, (2, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def equal(a, b):
    return a is b is None or torch.equal(a, b)


def gradients(model):
    return [p.grad for p in model.parameters()]


def test_what_is_changed_in_a_layer_is_another_kind():
    model, plain = learners()
    with graphs_everywhere(eager=True):
        make = GraphedStep(model, torch.device("cpu"))
    # a window is drawn for every step, and at last a weight is kept as it is
    for step, window in enumerate([None, 4, None, 4, None, 4, 4, None, None, None, None]):
        for learner in (model, plain):
            learner.zero_grad()
            learner.model.mixers[1].window = window
            learner.lm_head.weight.requires_grad_(step < 8)
        make(passes_of(model), given(16, step), torch.tensor(30))
        passes_of(plain)(given(16, step), torch.tensor(30))
        assert all(equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True)), step
    assert len(make.graphs) == 3


def test_gradients_that_others_made_are_added_to_and_left_to_them():
    model, plain = learners()
    with graphs_everywhere(eager=True):
        make = GraphedStep(model, torch.device("cpu"))
    for step in range(6):
        for learner in (model, plain):
            learner.zero_grad()
        # another shape comes first in odd updates, and is no more than seen in the first of them
        tokens = [12, 16] if step % 2 else [16, 16]
        for i, n in enumerate(tokens):
            make(passes_of(model), given(n, 10 * step + i), torch.tensor(30))
            passes_of(plain)(given(n, 10 * step + i), torch.tensor(30))
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True)), step


def test_the_number_of_graphs_is_limited():
    model, plain = learners()
    with graphs_everywhere(eager=True):
        make = GraphedStep(model, torch.device("cpu"))
    for tokens in [n for n in range(8, 8 + MOST + 2) for _ in range(3)]:
        for learner in (model, plain):
            learner.zero_grad()
        make(passes_of(model), given(tokens, 0), torch.tensor(30))
        passes_of(plain)(given(tokens, 0), torch.tensor(30))
        assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True))
    assert sum(captured is not None for captured in make.graphs.values()) == MOST


@pytest.mark.filterwarnings("ignore:the model has other modules now")
@pytest.mark.parametrize("path", ["lm_head", "model.layers.0", "model.norm"])
def test_nothing_is_replayed_after_a_module_was_replaced(path):
    model, plain = learners()
    with graphs_everywhere(eager=True) as works:
        make = GraphedStep(model, torch.device("cpu"))
        for step in range(6):
            if step == 3:
                captured = len(works)
                for learner in (model, plain):
                    other = copy.deepcopy(learner.get_submodule(path))
                    with torch.no_grad():
                        for p in other.parameters():
                            p.mul_(1.5)
                    learner.set_submodule(path, other)
            model.zero_grad()
            plain.zero_grad()
            loss = make(passes_of(model), given(16, step), torch.tensor(30)).loss.clone()
            assert torch.equal(loss, passes_of(plain)(given(16, step), torch.tensor(30)).loss), step
            assert all(equal(a, b) for a, b in zip(gradients(model), gradients(plain), strict=True)), step
    assert captured == len(works) > 0


def test_a_hook_that_comes_later_is_called_and_a_tensor_elsewhere_refused():
    model, _ = learners()
    with graphs_everywhere(eager=True):
        make = GraphedStep(model, torch.device("cpu"))
    calls = []
    for step in range(6):
        if step == 3:
            handle = model.register_forward_hook(lambda *_: calls.append(1))
        model.zero_grad()
        with pytest.warns(UserWarning, match="hooks") if step == 3 else nullcontext():
            make(passes_of(model), given(16, step), torch.tensor(30))
    assert len(calls) == 3
    handle.remove()
    model.zero_grad()
    with pytest.raises(ValueError, match="is on meta, the model on cpu"):
        make(passes_of(model), given(16, 0), torch.tensor(30, device="meta"))


def test_signatures_that_occur_once_are_dropped(monkeypatch):
    model, _ = learners()
    monkeypatch.setattr("tokenmix_core.training.cuda_graph.SEEN", 3)
    with graphs_everywhere(eager=True):
        make = GraphedStep(model, torch.device("cpu"))
    for tokens in [8, *range(8, 16)]:
        model.zero_grad()
        make(passes_of(model), given(tokens, 0), torch.tensor(30))
    assert [captured is None for captured in make.graphs.values()] == [False, True, True, True]


def test_a_trained_model_is_whole(corpus, captured, tmp_path):
    train(recipe(corpus, documents="joined", training_graph="always"), tmp_path / "run", progress=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    assert all(p.isfinite().all() for p in model.parameters())
    assert captured


@pytest.mark.gpu
@pytest.mark.parametrize("micro", [2048, 512])
@pytest.mark.parametrize("documents", ["joined", "separate"])
@pytest.mark.parametrize("mixers", [["gated_delta_net", "attention"], ["mamba2"]])
def test_graphs_on_a_gpu_train_alike(mixers, documents, micro, tmp_path):
    options = {"mamba2": {"head_dim": 64}} if mixers == ["mamba2"] else HYBRID["mixer_options"]
    small = recipe("mqar", model={**HYBRID, "hidden_size": 128, "mixers": mixers, "mixer_options": options})
    data = replace(small.data, seq_len=512, mqar_vocab_size=256, documents=documents)
    optimizer = replace(small.optimizer, batch_tokens=Tokens(2048), micro_batch_tokens=Tokens(micro))
    assert_graphs_train_alike(
        replace(small, data=data, optimizer=optimizer, run=replace(small.run, precision="bf16")), tmp_path
    )


@pytest.mark.gpu
def test_a_gpu_is_told_by_its_kind_or_its_number():
    model = torch.nn.Linear(8, 1, device="cuda")

    def passes(inputs, items):
        loss = model(inputs["x"]).mean()
        loss.backward()
        return Losses(loss.detach(), {})

    for device in ("cuda", "cuda:0"):
        make = GraphedStep(model, torch.device(device))
        for _ in range(3):
            model.zero_grad()
            make(passes, {"x": torch.ones(2, 8, device="cuda")}, None)
        assert any(make.graphs.values()), device


def learn(make, waits):
    """Return five gradients of a layer with dropout, by passes that `make` runs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)).cuda()

    def passes(inputs, items):
        loss = model(inputs["x"]).square().mean()
        waits(loss)
        loss.backward()
        return Losses(loss.detach(), {})

    call, found = make(model, passes), []
    for step in range(5):
        model.zero_grad()
        torch.manual_seed(step)
        call({"x": torch.ones(4, 8, device="cuda")})
        found.append(model[0].weight.grad.clone())
    return torch.stack(found)


def capturing(model, passes):
    make = GraphedStep(model, torch.device("cuda"), training_graph="auto")
    return lambda inputs: make(passes, inputs, None)


def fails_in_a_capture(loss):
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("out of memory")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("waits", "why"), [(torch.Tensor.item, "waits for the device"), (fails_in_a_capture, "out of memory")]
)
def test_a_gpu_continues_if_nothing_can_be_captured(waits, why):
    with pytest.warns(UserWarning, match=f"kernel by kernel: .*{why}") as caught:
        found = learn(capturing, waits)
    assert sum("kernel by kernel" in str(w.message) for w in caught) == 1
    assert torch.equal(found, learn(lambda model, passes: lambda inputs: passes(inputs, None), waits))


@pytest.mark.gpu
def test_auto_on_a_gpu_captures_the_third_pass(monkeypatch):
    captures = []

    def counted(device):
        capture = cuda_graphs.captures_cuda(device)
        return lambda work: captures.append(capture(work)) or captures[-1]

    monkeypatch.setattr(cuda_graphs, "capture_on", counted)
    found = learn(capturing, lambda loss: None)
    assert len(captures) == 1
    assert torch.equal(found, learn(lambda model, passes: lambda inputs: passes(inputs, None), lambda loss: None))
