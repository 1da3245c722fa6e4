"""Test the structure of the sources: no module imports itself through others, and no file is too long."""

from __future__ import annotations

from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [*ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("packages/*/benchmarks/*.py"), *ROOT.glob("arena/*.py")]
PACKAGES = ("tokenmix_core", "tokenmix_lte", "tokenmix_nats_l", "tokenmix_nha", "tokenmix_oryx")


def strongly_connected(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """Return the sets of more than one node that reach each other (Tarjan's algorithm)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = set()

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            position = stack.index(node)
            component = frozenset(stack[position:])
            del stack[position:]
            if len(component) > 1:
                found.add(component)

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def imports(annotations: bool) -> dict[str, set[str]]:
    """Return the modules that each module imports, with or without imports for type annotations alone."""
    # the lazy attributes of an `__init__` are listed under TYPE_CHECKING, too: they are imports that run
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=not annotations, cache_dir=None)
    return {module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules}


def described(cycle: frozenset[str], edges: dict[str, set[str]]) -> str:
    """Return a cycle as lines of one module and what it imports of the others."""
    return "\n".join(f"{module} -> {', '.join(sorted(edges[module] & cycle))}" for module in sorted(cycle))


@pytest.mark.parametrize("annotations", [False, True], ids=["at run time", "with type annotations"])
def test_no_import_cycle(annotations):
    edges = imports(annotations)
    cycles = [described(cycle, edges) for cycle in strongly_connected(edges)]
    assert not cycles, "import cycles:\n\n" + "\n\n".join(cycles)


def test_a_cycle_is_found_and_named():
    edges = {"a": {"b"}, "b": {"c", "d"}, "c": {"a", "d"}, "d": {"e"}, "e": set()}
    assert strongly_connected(edges) == {frozenset("abc")}
    assert described(frozenset("abc"), edges) == "a -> b\nb -> c\nc -> a"


def test_no_source_file_exceeds_400_lines():
    long = {path.name: count for path in SOURCES if (count := len(path.read_text().splitlines())) > 400}
    assert not long
