"""Compute the floor of a training step: the least possible time of each part on one GPU, by this cost model.

- products: 6 operations per token and weight of every linear layer, the output layer included, at the chip's rate.
- mixing: three times the mixers' operations of a forward pass, at the same rate.
- activations: traffic between matmuls, 2 bytes per element. The forward pass reads outputs of matmuls and writes their
  inputs once; the backward pass reads the outputs again, reads gradients of inputs, and writes gradients of outputs.
  At each norm, the forward pass reads and writes the residual stream, of 4 bytes per element; the backward pass reads
  it twice and writes it once.
- loss: logits written, read, and written as gradients, which two matmuls read.
- weights: each is read in 4 bytes and written in 2, its gradient read in 2 and written in 4; AdamW and clipping move
  32 bytes.

A step's **share as run** compares it with the measured time of its matmuls and mixing, plus one pass over activations,
logits and weights: the remainder is lost between the given kernels.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import nn

# by kind, a pattern of kernels' names; the first match counts
KINDS = {
    # torch's compiler names a kernel after its operations
    "compiled": r"^triton_(poi|red|per|tem|for)_",
    # before matmuls: FlashAttention-4's names also contain cutlass
    "attention": r"flash|fmha|cudnn.*sdpa|attention|listed_keys|^_(forward|backward_keys|backward_queries)$"
    r"|^_(list|merge|count|find|join|share|sum|meet|own|rank|attend|choose|split)_",
    "products": r"gemm|cutlass|nvjet|xmma|cublas|splitK",
    "scorer": r"scorer|hopper_layer_backward",
    "delta rule, scans": r"^(for|back)ward_(state_|chunk_)?kernel|gated_delta|delta_rule|chunk_|prepare_|segment_"
    r"|entering_|scan_rows_|ssd|slot_|recurrent|backward_scan|boundary_states|hopper_(forward|backward|window|gradients|step)"
    r"|(group|head)_gradients|scan_segments|(sum|repeat)_(gates|groups)|longest_first",
    "convolutions": r"conv",
    "norms": r"norm|rstd",
    "rotation": r"rotate|rotary|rope",
    "SwiGLU": r"swiglu",
    "gates": r"delta_gates|softplus|sigmoid",
    "loss": r"softmax|nll|cross_entropy",
    "optimizer": r"adam|multi_tensor|foreach",
    "copies between dtypes": r"direct_copy|copy_kernel|_to_copy",
    "copies": r"memcpy|memset|CatArray|copy|fill",
    "sums": r"reduce|CUDAFunctor_add|AddFunctor",
    "products by element": r"MulFunctor|mul",
    "activations": r"silu|gelu|sigmoid",
}
# kinds of a mixer's operations
OPERATIONS = ("attention", "scorer", "delta rule, scans", "convolutions")
# layers that share their input with no other layer
OWN_INPUTS = ("o_proj", "out_proj", "down_proj")


class Chip(NamedTuple):
    """Measured peak rates: operations per second and bytes per second."""

    flops: float
    bytes: float


# the key is a part of the GPU's name
CHIPS = {"H200": Chip(790e12, 4.27e12), "H100": Chip(790e12, 3.0e12)}


def chip_of(device: torch.device) -> Chip:
    """Return the peak rates of a GPU; those of an H200 for an unknown GPU and for a CPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((chip for part, chip in CHIPS.items() if part in name), CHIPS["H200"])


def floor(model: Any, rows: int, length: int, chip: Chip = CHIPS["H200"]) -> dict[str, float]:
    """Return the floor of a step's parts in milliseconds, see above, and their sum, "all"."""
    tokens = rows * length
    backbone, head = model.model, model.lm_head.weight
    weights, vocab, width = sum(p.numel() for p in model.parameters()), *head.shape
    linear = sum(m.weight.numel() for m in backbone.modules() if isinstance(m, nn.Linear)) + head.numel()
    mixing = sum(mixer.mixing_flops(length) for mixer in backbone.mixers)
    between, norms = 0, 1
    for block in backbone.layers:
        # the output of each norm, once for each layer that reads it
        norms += 1 if block.mlp is None else 2
        for name, layer in block.named_modules():
            if isinstance(layer, nn.Linear):
                own = layer.in_features if name.rpartition(".")[2] in OWN_INPUTS else 0
                between += 2 * own + 3 * layer.out_features
    between += 2 * width * norms
    seconds = {
        "products": 6 * linear * tokens / chip.flops,
        "mixing": 3 * mixing * tokens / chip.flops,
        "activations": tokens * (2 * between + 4 * 5 * width * norms) / chip.bytes,
        "loss": tokens * vocab * 2 * 5 / chip.bytes,
        "weights": weights * (6 + 6 + 32) / chip.bytes,
    }
    found = {part: 1e3 * x for part, x in seconds.items()}
    return found | {"all": sum(found.values())}


def as_run(floor: dict[str, float], kinds: dict[str, float]) -> float:
    """Return milliseconds of matmuls and mixing as measured, plus the floor of everything else."""
    return sum(kinds.get(x, 0.0) for x in ("products", *OPERATIONS)) + sum(
        floor[x] for x in ("activations", "loss", "weights")
    )


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel, re.IGNORECASE)), "others")
