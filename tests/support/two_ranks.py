"""Run scripts on two CPU processes, and check that a bfloat16 model trains with FSDP2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

_IN_BFLOAT16 = """
import importlib
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from tokenmix_core.training import float32_apart

rank, folder, module = int(sys.argv[1]), sys.argv[2], sys.argv[3]
importlib.import_module(module)
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
models = []
for _ in range(2):
    torch.manual_seed(0)
    models.append(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).to(torch.bfloat16))
model, plain = models
assert len({p.dtype for p in model.parameters()}) == 2
mesh = dist.init_device_mesh("cpu", (2,))
apart = float32_apart(mesh)
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh, shard_placement_fn=apart)
fully_shard(model, mesh=mesh, shard_placement_fn=apart)
ids = torch.randint(1, 50, (2, 1, 70), generator=torch.Generator().manual_seed(1))
losses = [plain(x, labels=x).loss for x in ids]
(sum(losses) / 2).backward()
loss = model(ids[rank], labels=ids[rank]).loss
loss.backward()
torch.testing.assert_close(loss.detach(), losses[rank].detach())
for (name, p), q in zip(model.named_parameters(), plain.parameters()):
    assert p.dtype == q.dtype and p.to_local().numel() < q.numel(), name
    if q.grad is None:
        assert p.grad is None or not p.grad.full_tensor().any(), name
        continue
    got, expected = p.grad.full_tensor().float(), q.grad.float()
    bound = 1e-5 if p.dtype == torch.float32 else 2e-2
    assert (got - expected).norm() <= bound * expected.norm() + 1e-12, (name, got, expected)
norms = [float(torch.nn.utils.clip_grad_norm_(x.parameters(), 1.0)) for x in (model, plain)]
assert abs(norms[0] - norms[1]) < 1e-2 * norms[1], norms
for x in (model, plain):
    torch.optim.AdamW(x.parameters(), lr=1e-2).step()
for (name, p), q in zip(model.named_parameters(), plain.parameters()):
    if p.dtype == torch.float32:
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-3, atol=1e-4, msg=name)
dist.destroy_process_group()
"""


def run_on_two_ranks(script: str, *call: str) -> None:
    """Run a script, which takes its rank and `call`, in two processes; fail with the errors of one that fails."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(rank), *call], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for process in ranks:
            errors = process.communicate(timeout=200)[1]
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()


def check_sharded_in_bfloat16(config: Any, folder: Path) -> None:
    """Assert that losses and gradients of a model sharded by FSDP2, and updates of its float32 parameters, are right.

    They must be those of one process. The model is bfloat16; mixers keep some parameters in float32 (`Mixer.float32`).
    """
    config.save_pretrained(folder)
    run_on_two_ranks(_IN_BFLOAT16, str(folder), type(config).__module__)
