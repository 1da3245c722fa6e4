"""FSDP2: precision policy, use on a CPU, float32 parameters in bfloat16 models, checkpoints for any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tokenmix_core.training.shard_metadata import VerifiedReader

# names of the folders in a sharded checkpoint
MODEL_SHARDS, OPTIMIZER_SHARDS = "model_shards", "optimizer_shards"
# shards and gradients are float32; autocast computes GEMMs in bfloat16, as in a run with one process
POLICY = {"param_dtype": None, "reduce_dtype": "float32", "output_dtype": None, "cast_forward_inputs": False}


def apply_fsdp_policy(accelerator: Any, plugin_args: Mapping[str, Any]) -> None:
    """Make an accelerator shard models by our precision policy, also on a CPU.

    accelerate's own policy would cast all parameters, the reduction of gradients and the outputs to bfloat16, but
    A_log, dt_bias and norms must stay float32. On a CPU, accelerate ignores its FSDP plugin and replicates the model,
    because its list of device types for FSDP lacks the CPU; FSDP2 itself works there.
    """
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    state = accelerator.state
    if accelerator.distributed_type == DistributedType.MULTI_CPU:
        # accelerate reads these attributes, which all instances of this class share
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**plugin_args)
        state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
        reduce_dtype=torch.float32, cast_forward_inputs=False
    )


def float32_apart(mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Return a `shard_placement_fn` with which `fully_shard` can shard bfloat16 models whose decay rates are float32.

    All parameters of an FSDP2 unit must have one dtype, but A_log, dt_bias and D are float32 beside bfloat16 matrices.
    `fully_shard` gathers parameters of different process groups separately; so the float32 parameters get a process
    group of their own, with the same ranks. Pass the same function to all calls: `fully_shard(layer, mesh=mesh,
    shard_placement_fn=apart)`.

    Raises:
        ValueError: the mesh has several dimensions, or this version of torch allows one process group per unit only.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp

    if mesh.ndim != 1:
        raise ValueError(f"float32_apart needs a mesh of one dimension, got {mesh.ndim}")
    if not hasattr(fsdp, "ShardPlacementResult"):
        raise ValueError(
            f"torch {torch.__version__} has one process group in a unit of FSDP2: shard a float32 model, with "
            "MixedPrecisionPolicy or autocast, or use a newer torch"
        )
    group: Any = fsdp.FSDPMeshInfo(mesh, shard_mesh_dim=0)
    group.shard_process_group = dist.new_group(mesh.mesh.tolist(), use_local_synchronization=True)
    apart = fsdp.ShardPlacementResult(Shard(0), group)
    return lambda parameter: apart if parameter.dtype == torch.float32 else None


def whole(value: Any, *, keep: bool) -> Any:
    """Return a nested state in which every sharded tensor is gathered to a whole tensor on the CPU.

    All ranks must call this, because each rank sends its shards; ranks with `keep=False` get empty tensors.
    """
    if isinstance(value, DTensor):
        full = value.full_tensor().detach()
        return full.cpu() if keep else full.new_empty(0)
    if isinstance(value, dict):
        return {key: whole(item, keep=keep) for key, item in value.items()}
    return [whole(item, keep=keep) for item in value] if isinstance(value, list) else value


def whole_weights(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Return a sharded model's state dict with whole tensors (`keep`: see `whole`); tied weights occur once."""
    return whole(_weights(model), keep=keep)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    tied = {*dict(model.named_parameters(remove_duplicate=False))} - {*dict(model.named_parameters())}
    return {name: x for name, x in model.state_dict().items() if name not in tied}


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an unsharded optimizer; each state tensor is sharded like its parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    sharded = {
        index: {
            key: _like(parameters[index], x) if isinstance(x, Tensor) and x.dim() else x for key, x in values.items()
        }
        for index, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": sharded})


def load_weights(model: nn.Module, folder: Path) -> None:
    """Load the safetensors files of a checkpoint into a sharded model; each rank keeps its own shard.

    Raises:
        ValueError: the checkpoint lacks a parameter of the model.
    """
    names = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    missing = set(dict(model.named_parameters()))
    with torch.no_grad():
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    names[name].copy_(_like(names[name], file.get_tensor(name)))
                    missing.discard(name)
    if missing:
        raise ValueError(f"{folder} has no weights named {', '.join(sorted(missing)[:3])}")


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    value = value.to(parameter.device)
    # no rank sends its tensor, because every rank has read the whole one
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def has_shards(folder: Path) -> bool:
    """True if the checkpoint in `folder` is sharded."""
    return (folder / MODEL_SHARDS).is_dir()


def save_shards(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Write weights and optimizer states with torch's distributed checkpoint; every rank writes its own shards.

    Raises:
        OSError: raised on all ranks if one of them cannot write.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    states = {names[parameter]: values for parameter, values in optimizer.state.items()}
    for part, tensors in ((MODEL_SHARDS, _weights(model)), (OPTIMIZER_SHARDS, states)):
        _together(save, tensors, checkpoint_id=folder / part)


def load_weight_shards(model: nn.Module, folder: Path) -> None:
    """Load weights that `save_shards` has written, possibly on another number of ranks.

    Raises:
        ValueError: the folder's metadata is damaged, or names anything but the classes that describe tensors.
        OSError: raised on all ranks if one of them cannot read.
    """
    # these are the model's own tensors, which loading overwrites
    _together(load, _weights(model), storage_reader=VerifiedReader(folder / MODEL_SHARDS))


def load_optimizer_shards(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Load optimizer states that `save_shards` has written, on any number of ranks; hyperparameters do not change.

    Raises:
        ValueError: the folder's metadata is damaged, or names anything but the classes that describe tensors.
        OSError: raised on all ranks if one of them cannot read.
    """
    reader = VerifiedReader(folder / OPTIMIZER_SHARDS)
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    parameters = dict(model.named_parameters())
    states: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for path, about in saved.items():
        name, _, key = path.rpartition(".")
        # moments have the shape of their parameter; the step count is a scalar
        like = about.size == parameters[name].shape
        states[name][key] = torch.zeros_like(parameters[name]) if like else torch.zeros(about.size)
    _together(load, states, storage_reader=reader)
    names = {parameter: name for name, parameter in parameters.items()}
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    by_index = {index: states[name] for index, name in enumerate(ordered)}
    optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})


def _together(work: Callable[..., Any], tensors: dict[str, Any], **where: Any) -> None:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            work(tensors, **where)
    except CheckpointException as error:
        # torch's error is no subclass of Exception, and its text has the tracebacks of all ranks: raise the first cause
        rank, (cause, _) = min(error.failures.items())
        raise OSError(f"rank {rank}: {cause}") from cause
