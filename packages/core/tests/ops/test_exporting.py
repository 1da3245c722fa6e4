"""Test references as operators: torch's rules, and the values of the function."""

import torch

from tokenmix_core.ops.exporting import _reference, exportable, scan_shapes


def test_the_operator_keeps_torchs_rules_and_gives_the_functions_values():
    def scan(q, v, scale, cu_seqlens=None):
        return scale * v, torch.zeros(q.shape[0], 2, 4, 4)

    exportable(scan, scan_shapes)
    q, v = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4)
    given = f"{scan.__module__}.{scan.__qualname__}", [q, v], "q v", "{'scale': 2.0}"
    torch.library.opcheck(_reference, given)
    o, state = _reference(*given)
    assert torch.equal(o, 2 * v)
    assert not state.any()


def test_a_compiled_call_has_gradients():
    def scan(q, v, scale):
        return scale * v, q.new_zeros(q.shape[0], 2, 4, 4)

    q, v = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 4, requires_grad=True)
    o, _ = torch.compile(exportable(scan, scan_shapes), fullgraph=True, backend="aot_eager")(q, v, 2.0)
    o.sum().backward()
    assert torch.equal(v.grad, torch.full_like(v, 2))
