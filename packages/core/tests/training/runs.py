"""Small runs for the tests of training, in processes of their own where a test kills or joins them."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tokenmix_core.modeling import find_mixer, register_mixer
from tokenmix_core.nn.attention import Attention
from tokenmix_core.nn.head_weights import HeadWeights
from tokenmix_core.training.callbacks import AdaptHeadWeights, read_metrics
from tokenmix_core.training.recipe import DataRecipe, OptimizerRecipe, Recipe, RunRecipe, Tokens
from tokenmix_core.training.resharding import layer_modules
from tokenmix_core.training.trainer import train

HYBRID = {
    "vocab_size": 264,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "mixers": ["gated_delta_net", "attention"],
    "mixer_options": {
        "gated_delta_net": {"num_heads": 2, "head_dim": 16, "expand_v": 1.0},
        "attention": {"num_heads": 2},
    },
}


class Hostile:
    """An object whose unpickling creates a file."""

    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> Any:
        return Path.touch, (self.ran,)


class Penalised(Attention):
    """Attention with a penalty on large values, weighted by head: a substitute for learned sparsity."""

    def __init__(self, hidden_size: int, *, num_heads: int = 2, norm_eps: float = 1e-6):
        super().__init__(hidden_size, num_heads=num_heads, norm_eps=norm_eps)
        self.head_weights = HeadWeights(num_heads, initial=0.05)

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> Any:
        out, _ = super().forward(hidden_states, **options)
        size = self.v_proj(hidden_states).unflatten(-1, (self.num_heads, -1)).abs().mean(-1).flatten(0, 1)
        if self.training:
            self.head_weights.observe(size > 0.05)
        return out, {"size_loss": (size * self.head_weights.weight).sum(), "size": size.detach()}


try:
    find_mixer("penalised")
except ValueError:
    register_mixer("penalised", Penalised)


def adapt(weight: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
    """Return new weights by a feedback rule: bounded, larger if over half of the values are large, else smaller."""
    weight = weight * torch.where(average > 0.5, 1.5, torch.where(average < 0.45, 1 / 1.5, 1.0))
    return weight.clamp(1e-9, 1.0)


def adaptation(recipe: Recipe) -> AdaptHeadWeights:
    return AdaptHeadWeights(adapt, every=2, decay=0.5)


def recipe(corpus: Path | str, **changes: Any) -> Recipe:
    """Return a recipe of eight steps of four rows of 32 tokens; `changes` may name fields of any of its parts."""
    made = Recipe(
        name="small",
        description="a small hybrid",
        model=changes.pop("model", HYBRID),
        callbacks=changes.pop("callbacks", ()),
        data=DataRecipe(sources=[str(corpus)], seq_len=32),
        optimizer=OptimizerRecipe(
            total_tokens=Tokens(8 * 128),
            warmup_tokens=Tokens(2 * 128),
            batch_tokens=Tokens(128),
            micro_batch_tokens=Tokens(128),
            learning_rate=1e-2,
            min_learning_rate=1e-3,
        ),
        run=RunRecipe(precision="fp32", logging_steps=1, save_steps=3),
    )
    for part in ("data", "optimizer", "run"):
        group = getattr(made, part)
        own = {name: changes.pop(name) for name in list(changes) if hasattr(group, name)}
        made = replace(made, **{part: replace(group, **own)})
    assert not changes, changes
    return made


def penalised_model() -> dict[str, Any]:
    return {
        **HYBRID,
        "mixers": ["gated_delta_net", "penalised"],
        "mixer_options": {"gated_delta_net": HYBRID["mixer_options"]["gated_delta_net"], "penalised": {"num_heads": 2}},
    }


def curve(output_dir: Path) -> dict[int, tuple[float, ...]]:
    """Return loss, gradient norm and loss terms by step, from the JSONL log."""
    lines = [line for line in read_metrics(output_dir / "metrics.jsonl") if "loss" in line]
    terms = sorted({name for line in lines for name in line if name.endswith("_loss")})
    return {line["step"]: tuple(line[name] for name in ("loss", "grad_norm", *terms)) for line in lines}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def _context() -> Any:
    # fork children from a server that has imported everything; CUDA does not survive a fork, so then spawn them
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")
    context.set_forkserver_preload(["runs"])
    # the server of Python 3.11 does not get its parent's sys.path, and ignores that it cannot import `runs`
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()
    return context


def _child(environment: dict[str, str], work: Callable[..., Any], args: tuple, options: dict[str, Any]) -> None:
    os.environ.update(environment)
    # lead a process group, so that a signal reaches this process and all that it starts, like Ctrl-C in a terminal
    os.setpgrp()
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    work(*args, **options)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Processes:
    """Runs `work(*args, **options)` in this number of connected processes."""

    def __init__(self, count: int, work: Callable[..., Any], *args: Any, **options: Any) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.children = []
        for rank in range(count):
            environment = {"TOKENMIX_CACHE": os.environ.get("TOKENMIX_CACHE", "")}
            if count > 1:
                environment |= {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(count),
                    "LOCAL_WORLD_SIZE": str(count),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
            child = _context().Process(target=_child, args=(environment, work, args, options))
            child.start()
            self.children.append(child)

    def wait_for(self, there: Callable[[], bool], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not there():
            assert time.monotonic() < end, "nothing happened"
            assert all(child.exitcode in (None, 0) for child in self.children), "a process failed"
            time.sleep(0.005)

    def signal(self, number: int, *, group: bool = False) -> None:
        send = os.killpg if group else os.kill
        for child in self.children:
            if child.is_alive():
                send(child.pid, number)

    def join(self) -> list[int]:
        """Wait for the processes and return their exit codes."""
        for child in self.children:
            child.join(240)
            assert child.exitcode is not None, "a process does not end"
        return [child.exitcode for child in self.children]


def train_with_graphs(made: Recipe, output_dir: Path, **options: Any) -> None:
    """Train with emulated CUDA graphs, and write how many passes were captured into the file `captured-RANK`."""
    from tokenmix_core.testing.fake_cuda_graph import graphs_everywhere

    with graphs_everywhere(eager=True) as works:
        train(made, output_dir, **options)
    (output_dir / f"captured-{os.environ['RANK']}").write_text(str(len(works)))


def refuse_on_ranks(folder: Path) -> None:
    """Average gradients of two dtypes; write the errors about a missing gradient and about a frozen parameter."""
    from torch.nn.parallel import DistributedDataParallel

    from tokenmix_core.training.replicas import Replica

    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1).double())
    replica, said = Replica(DistributedDataParallel(model)), []

    def step(layers: int) -> None:
        with replica.micro_batch(last=True) as module:
            y = module[0](torch.full((1, 2), rank + 1.0))
            (module[1](y.double()) if layers > 1 else y).sum().backward()

    step(2)
    gradient = model[0].weight.grad
    assert gradient is not None
    expected = model[1].weight.detach().float().T * 1.5
    torch.testing.assert_close(gradient, expected.expand(3, 2))
    for layers, trained in ((1, True), (2, False)):
        model[0].requires_grad_(trained)
        try:
            step(layers)
        except RuntimeError as error:
            said.append(str(error))
        replica = Replica(DistributedDataParallel(model.requires_grad_())) if trained else replica
    (folder / f"rank{rank}").write_text("\n".join(said))


def run(processes: int, made: Recipe, output_dir: Path, **options: Any) -> dict[int, tuple[float, ...]]:
    """Train to the end in processes of their own; return the curve."""
    codes = Processes(processes, train, made, output_dir, progress=False, **options).join()
    assert codes == [0] * processes
    return curve(output_dir)


def train_traced(made: Recipe, output_dir: Path) -> None:
    """Train with `torch.compile`, in a process of its own.

    The model is traced and differentiated ahead of time, but run eagerly: a CPU's code generator takes minutes.
    """
    from tokenmix_core.training import trainer

    plain = trainer.training_arguments

    def eager(*args: Any, **options: Any) -> Any:
        arguments = plain(*args, **options)
        arguments.torch_compile_backend = "aot_eager"
        return arguments

    trainer.training_arguments = eager
    train(replace(made, run=replace(made.run, torch_compile=True)), output_dir, progress=False)


def perturb(recipe: Recipe) -> Any:
    """Return a callback that changes each initial weight by a relative error of 1e-7, float32's rounding error."""
    from transformers import TrainerCallback

    class Perturb(TrainerCallback):
        def on_train_begin(self, *_: Any, model: torch.nn.Module, **__: Any) -> None:
            generator = torch.Generator().manual_seed(recipe.run.seed)
            with torch.no_grad():
                for x in model.parameters():
                    x *= 1 + 1e-7 * torch.randn(x.shape, generator=generator)

    return Perturb()


def slow_steps(recipe: Recipe) -> Any:
    """Return a callback that slows a run down, so that a test can interrupt it."""
    from transformers import TrainerCallback

    class Slow(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            time.sleep(0.1)

    return Slow()


def touch_steps(recipe: Recipe) -> Any:
    """Return a callback that writes a file for every step, for a run that seldom logs."""
    from transformers import TrainerCallback

    class Touch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            Path(args.output_dir, f"step-{state.global_step}").touch()

    return Touch()


def look_at_folders(folders: list[Path], said: Path) -> None:
    """Check that the ranks, each of which gets its own path, share a folder; write the error message to `said`."""
    from tokenmix_core.training.ranks import require_shared_folder, together

    rank = int(os.environ["RANK"])
    with together(20):
        try:
            require_shared_folder(folders[rank], patience=0.5)
        except ValueError as error:
            Path(said, str(rank)).write_text(str(error))


def limit_files(recipe: Recipe) -> Any:
    """Return a callback that leaves rank 0 no space for a checkpoint."""
    import resource

    from transformers import TrainerCallback

    class Limit(TrainerCallback):
        def on_train_begin(self, args: Any, *_: Any, **__: Any) -> None:
            if args.process_index == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))

    return Limit()


def fail_on_rank_1(recipe: Recipe) -> Any:
    """Return a callback that raises an error on rank 1, after the second step."""
    from transformers import TrainerCallback

    class Fail(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2 and args.process_index == 1:
                raise ValueError("no luck")

    return Fail()


def stop_at_5(recipe: Recipe) -> Any:
    """Return a callback that ends a run after five steps, with a checkpoint."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                control.should_training_stop = control.should_save = True

    return Stop()


def stop_each_step(recipe: Recipe) -> Any:
    """Return a callback that ends a run after one step, with a checkpoint."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = control.should_save = True

    return Stop()


def check_sharded(recipe: Recipe) -> Any:
    """Return a callback that fails unless parameters are sharded between micro-batches, in units of the right size."""
    from torch.distributed.tensor import DTensor
    from transformers import TrainerCallback

    class Check(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **_: Any) -> None:
            assert {isinstance(p, DTensor) for p in model.parameters()} == {recipe.run.fsdp}
            if recipe.run.fsdp:
                layers: list[Any] = layer_modules(model)
                units = len({id(layer._get_fsdp_state()) for layer in layers})
                assert units == len(layers) // max(1, recipe.run.fsdp_unit_layers)

        def on_substep_end(self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **_: Any) -> None:
            assert {isinstance(p, DTensor) for p in model.parameters()} == {recipe.run.fsdp}

    return Check()


def check_autocast(recipe: Recipe) -> Any:
    """A callback that fails unless layers compute in the recipe's precision, from the first step on."""
    from transformers import TrainerCallback

    class Check(TrainerCallback):
        def __init__(self) -> None:
            self.seen: set[Any] = set()

        def on_train_begin(self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **_: Any) -> None:
            def see(module: torch.nn.Module, inputs: Any, output: Any) -> None:
                self.seen.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32)

            layer_modules(model)[0].register_forward_hook(see)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert self.seen == {torch.bfloat16 if recipe.run.precision == "bf16" else torch.float32}

    return Check()


def train_with_small_files(made: Recipe, output_dir: Path) -> None:
    """Train with a limit on file sizes, and write the message of the error to a file."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        train(made, output_dir, progress=False)
    except OSError as error:
        Path(output_dir, "said").write_text(str(error))


def train_by_command(recipes: list[Recipe], output_dirs: list[Path], said: Path, *flags: str) -> None:
    """Run `tokenmix train` with the recipe and folder of this rank, and store its stderr."""
    from tokenmix_core.cli import main

    rank = int(os.environ["RANK"])
    os.dup2(os.open(said / f"rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    command = ["train", "small", "--out", str(output_dirs[rank % len(output_dirs)]), "--no-eval", *flags]
    code = main(command, recipes={"small": lambda: recipes[rank % len(recipes)]})
    os._exit(code)


def steps_logged(output_dir: Path) -> int:
    path = output_dir / "metrics.jsonl"
    return sum('"loss"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())
