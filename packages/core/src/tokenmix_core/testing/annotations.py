"""A plugin of pytest that holds calls to the shapes and dtypes of their annotations.

`pytest -p tokenmix_core.testing.annotations` is a run of its own, in eager mode: torch.compile cannot trace checks, nor
Triton compile functions with them.
"""

from __future__ import annotations

import pkgutil
from importlib.util import find_spec

from jaxtyping import install_import_hook

_PACKAGES = ("tokenmix_core", "tokenmix_lte", "tokenmix_nats_l", "tokenmix_nha", "tokenmix_oryx")
# folders of core whose functions run in eager mode; of operations their public functions and references
_FOLDERS = ("modeling", "nn")
_OF_OPERATIONS = ("api", "reference")
# in a module's source: it defines kernels, or operators whose schema torch reads from its own annotations
_NOT_IN_EAGER_MODE = ("triton.jit", "gluon.jit", "custom_op(", "triton_op(", "library.define")


def checked_modules() -> list[str]:
    """The modules whose functions are checked: those that run in eager mode alone, of the packages that are here."""
    found = []
    for package in _PACKAGES:
        spec = find_spec(package)
        for folder in [] if spec is None else spec.submodule_search_locations or []:
            for module in pkgutil.walk_packages([folder], f"{package}."):
                _, first, *rest = module.name.split(".")
                if module.ispkg or (first == "ops" and rest[-1:] not in ([name] for name in _OF_OPERATIONS)):
                    continue
                if package == "tokenmix_core" and first not in (*_FOLDERS, "ops", "chunking"):
                    continue
                found.append(module.name)
    return [name for name in found if not _runs_elsewhere(name)]


def _runs_elsewhere(name: str) -> bool:
    # found without importing it
    path = find_spec(name.partition(".")[0]).submodule_search_locations[0]  # type: ignore[union-attr, index]
    with open(f"{path}/{'/'.join(name.split('.')[1:])}.py", encoding="utf-8") as file:
        source = file.read()
    return any(word in source for word in _NOT_IN_EAGER_MODE)


install_import_hook(checked_modules(), "beartype.beartype")
