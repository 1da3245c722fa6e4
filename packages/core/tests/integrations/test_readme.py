"""What the workspace's README says about using our kernels runs as it stands there."""

from pathlib import Path

import torch

REPOSITORY = Path(__file__).parents[4]


def test_the_lines_on_using_our_kernels_run():
    section = (REPOSITORY / "README.md").read_text(encoding="utf-8").split("## Use our kernels in your model")[1]
    code = section.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line]) <= 10
    q, k, v = torch.randn(3, 1, 12, 2, 64)
    given = {"prompt": torch.arange(12).view(1, 12), "q": q, "k": k, "v": v}
    names = given | {"g": -torch.rand(1, 12, 2), "beta": torch.rand(1, 12, 2)}
    # small, for time
    for large, small in (("=32000", "=300"), ("=512", "=64"), ("=1024", "=64"), ("=20", "=3")):
        code = code.replace(large, small)
    exec(code, names)
    assert names["tokens"].shape == (1, 15)
    assert names["state"].shape == (1, 2, 64, 64)
