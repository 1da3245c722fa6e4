"""The contract of gated linear attention: chunks against the recurrence."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from tokenmix_core.ops.types import ScanOutput
from tokenmix_core.testing.closeness import assert_within
from tokenmix_core.testing.operations import Call, OpContract
from tokenmix_nha.ops import chunk_gla


def z(*shape: int, dtype=torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def by_chunks(impl=None, **arguments):
    return chunk_gla(**arguments)


class TestGatedLinearAttention(OpContract):
    covers = (chunk_gla,)
    absent: ClassVar = {
        "kernels": "plain PyTorch: a baseline",
        "step": "a token is a call of one",
        "malformed_steps": "no steps",
        "operators": "no custom ops",
        "traced": "a scan over chunks that Python repeats: a graph for each number of them",
        "replayed": "no launches of its own",
    }
    forms: ClassVar = {"chunks": by_chunks}
    tokens = ("q", "k", "v", "g")
    state = ("initial_state", "final_state")
    cases: ClassVar = {
        "weak gates and states": dict(T=37, gate=0.1, N=2),
        "strong gates and states": dict(T=300, gate=300.0, N=2),
        "no states": dict(T=300),
    }
    lengths = (1, 15, 16, 17, 37)
    parts: ClassVar = {"of a sequence": dict(T=37)}
    # 600 tokens are more chunks than `CHUNK`, so that the scan recurses; boundaries lie inside chunks and at their ends
    packed: ClassVar = {
        "with states": dict(N=5, boundaries=[0, 20, 20, 21, 37, 37]),
        "weak gates": dict(gate=0.1, boundaries=[0, 3, 3, 32, 33, 50, 500, 600, 600]),
        "strong gates": dict(gate=300.0, boundaries=[0, 3, 3, 32, 33, 50, 500, 600, 600]),
    }
    neighbours: ClassVar = dict(B=3, T=5, N=3)
    valid: ClassVar = dict(T=5, N=2)
    malformed: ClassVar = {
        "gates of another size": ({"g": z(2, 5, 2, 4)}, "g must have shape"),
        "heads that do not divide": ({"q": z(2, 5, 3, 5)}, "HQ must be a multiple"),
        "mixed dtypes": ({"q": z(2, 5, 4, 5, dtype=torch.float64)}, "share one dtype"),
        "a state of other rows": ({"initial_state": z(1, 2, 5, 7)}, "initial_state must have shape"),
        "a state of another dtype": ({"initial_state": z(2, 2, 5, 7, dtype=torch.float64)}, "must be float32"),
        "packed rows": ({"cu_seqlens": torch.tensor([0, 5])}, "a packed batch has B = 1"),
        "a list": ({"q": [1.0]}, "q must be a tensor of shape .*, got list"),
        "a scale that is no number": ({"scale": float("nan")}, "scale must be a finite number, got nan"),
    }

    def make(
        self,
        dtype=torch.float64,
        device="cpu",
        seed=0,
        B=2,
        T=37,
        N=None,
        gate=1.0,
        boundaries: list[int] | None = None,
    ) -> Call:
        options = {}
        if boundaries is not None:
            options["cu_seqlens"], B, T = torch.tensor(boundaries, device=device), 1, boundaries[-1]
        generator = torch.Generator().manual_seed(seed)
        shapes = {"q": (B, T, 4, 5), "k": (B, T, 2, 5), "v": (B, T, 2, 7), "g": (B, T, 2, 5)}
        shapes |= {} if N is None else {"initial_state": (N, 2, 5, 7)}
        x = {name: torch.randn(s, dtype=torch.float64, generator=generator) for name, s in shapes.items()}
        x["g"] = gate * torch.nn.functional.logsigmoid(x["g"])
        return Call({name: t.to(device, dtype) for name, t in x.items()}, options)

    def definition(self, q, k, v, g, initial_state=None):
        state = v.new_zeros(len(q), 2, 5, 7) if initial_state is None else initial_state
        outputs = []
        for t in range(q.shape[1]):
            state = g[:, t].exp().unsqueeze(-1) * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
            outputs.append(torch.einsum("nhk,nhkv->nhv", q[:, t], state.repeat_interleave(2, 1)) * 5**-0.5)
        return ScanOutput(torch.stack(outputs, 1), state)

    def test_float32_errs_no_more_than_the_recurrence_in_float32(self):
        x, _ = self.make(N=2)
        narrow = {name: t.float() for name, t in x.items()}
        assert_within("o", chunk_gla(**narrow).o, self.definition(**x).o, self.definition(**narrow).o)
