"""Test that layers of all packages work in one model: each paper's with each other paper's, and all together."""

import importlib.util
from itertools import combinations
from pathlib import Path
from typing import ClassVar

from tokenmix_core.testing.interleaving import CORE, InterleavingContract


def mixers_of(path):
    spec = importlib.util.spec_from_file_location(f"{path.parts[-3]}_interleaving", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MIXERS


PACKAGES = Path(__file__).parents[1] / "packages"
PAPERS = [mixers_of(path) for path in sorted(PACKAGES.glob("*/tests/test_interleaving.py"))]


class TestPapers(InterleavingContract):
    mixers: ClassVar = {name: options for paper in PAPERS for name, options in paper.items()}
    # a chunk of NAtS-L and the beginning of the next
    tokens: ClassVar = 70

    @classmethod
    def groups(cls):
        apart = [(mine, other) for one, two in combinations(PAPERS, 2) for mine in one for other in two]
        return [*apart, (*CORE, *cls.mixers)]

    def test_every_paper_takes_part(self):
        papers = {path.name for path in PACKAGES.iterdir() if (path / "pyproject.toml").exists()} - {"core"}
        assert len(PAPERS) == len(papers)
