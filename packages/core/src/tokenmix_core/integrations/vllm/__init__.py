"""Our models in vLLM: `vllm serve FOLDER` finds this plug-in by its entry point `vllm.general_plugins`.

Each layer keeps its state in a slot of vLLM's cache of recurrent states, or its keys and values in vLLM's pages. vLLM
is imported only when it loads this plug-in, and core does not depend on it. Papers' packages add the architectures of
their checkpoints by entry points of the group `tokenmix.vllm`, whose name is the architecture and whose value is a
module that registers its model types when imported. With the environment variable `TOKENMIX_VLLM_KERNELS=1`, vLLM's own
models with Gated DeltaNet layers also compute by our kernels (`third_party.py`).
"""

from __future__ import annotations

import os
from importlib.metadata import entry_points

GROUP = "tokenmix.vllm"
KERNELS = "TOKENMIX_VLLM_KERNELS"


def register() -> None:
    """Register our architectures, the metadata of our states and, if `KERNELS` is 1, our layers of vLLM's models.

    vLLM calls this in each of its processes.
    """
    from vllm import ModelRegistry  # pyright: ignore[reportMissingImports]
    from vllm.v1.attention.backends.registry import (  # pyright: ignore[reportMissingImports]
        MambaAttentionBackendEnum,
        register_backend,
    )

    import tokenmix_core  # noqa: F401
    from tokenmix_core.integrations.vllm.scheduler import register_config

    for point in entry_points(group=GROUP):
        point.load()
        ModelRegistry.register_model(point.name, f"{__name__}.model:ServedCausalLM")
        register_config(point.name)
    register_backend(MambaAttentionBackendEnum.CUSTOM, f"{__name__}.metadata.StateBackend", is_mamba=True)
    if os.environ.get(KERNELS) == "1":
        from tokenmix_core.integrations.vllm.third_party import register_layers

        register_layers()
