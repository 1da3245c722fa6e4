"""Our kernels in the Gated DeltaNet layers of vLLM's own models: OLMo-Hybrid, Qwen3-Next and Qwen3.5.

vLLM replaces a `PluggableLayer` by the subclass that a plug-in registers under the layer's name. Ours keep vLLM's
projections, norms and slots, and replace the convolution, the gates and the delta rule. A slot has the bytes that vLLM
allocates, in our layouts: inputs of the convolution `[D, W − 1]` and states `[HV, K, V]`. Nothing but the layer reads
a slot; prefix caching copies it whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context  # pyright: ignore[reportMissingImports]
from vllm.logger import init_logger  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.mamba.abstract import MambaBase  # pyright: ignore[reportMissingImports]
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import (  # pyright: ignore[reportMissingImports]
    OlmoHybridGatedDeltaNetAttention,
)
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (  # pyright: ignore[reportMissingImports]
    QwenGatedDeltaNetAttention,
)

from tokenmix_core.nn import HeadFit
from tokenmix_core.ops import (
    delta_gates,
    gated_delta_rule_prefill,
    gated_delta_rule_step,
    short_conv_steps,
    short_convs_prefill,
)

logger = init_logger(__name__)


# a mixin without a base class: the classes that it extends exist only in vLLM
class _OurKernels:
    """A layer of vLLM that computes its convolutions, gates and delta rule with our kernels.

    vLLM's own kernels run if slots hold drafted tokens (speculative decoding), or if heads have sizes whose states
    need more memory in our layout.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        layer: Any = self
        self.sizes = [layer.key_dim // layer.tp_size] * 2 + [layer.value_dim // layer.tp_size]
        self.value_heads = layer.num_v_heads // layer.tp_size
        self.max_beta = 2.0 if getattr(layer, "allow_neg_eigval", False) else 1.0
        self.fit = HeadFit(layer.head_k_dim, layer.head_v_dim, (64, 128, 256))
        heads, self.scale = (layer.head_k_dim, layer.head_v_dim), layer.head_k_dim**-0.5
        self.ours = not layer.num_spec and heads == (
            self.fit.kernel_key_size,
            self.fit.parts * self.fit.kernel_value_size,
        )
        if not self.ours:
            why = "speculative decoding" if layer.num_spec else f"heads of sizes {heads}"
            logger.warning_once("tokenmix: vLLM's own kernels of Gated DeltaNet run, because of %s", why)
        elif hasattr(layer, "forward_cuda"):
            # the one of the Qwen layer's forwards that calls `_forward_core`; it runs on every device
            self._forward_method = layer.forward_cuda

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        if self.ours:
            return MambaBase.get_kv_cache_spec(self, vllm_config)
        return super().get_kv_cache_spec(vllm_config)  # pyright: ignore[reportAttributeAccessIssue]

    def get_prefill_checkpoint_alignment(self) -> int | None:
        # vLLM calls this from version 0.32 on; our kernels store no states within a prompt
        return None if self.ours else super().get_prefill_checkpoint_alignment()  # pyright: ignore[reportAttributeAccessIssue]

    def _forward_core(self, mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> None:
        """Write the delta rule's outputs for the tokens of a step, and update the slots of the step's requests."""
        if not self.ours:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)  # pyright: ignore[reportAttributeAccessIssue]
            return
        layer: Any = self
        found = get_forward_context().attn_metadata
        step = found.get(layer.prefix) if isinstance(found, dict) else None
        if step is None:
            # vLLM measures memory by a step without requests
            return
        n, end = step.num_decode_tokens, step.num_decode_tokens + step.num_prefill_tokens
        if n:
            core_attn_out[:n] = self._decode(mixed_qkv[:n], a[:n], b[:n], step)
        if end > n:
            core_attn_out[n:end] = self._prefill(mixed_qkv[n:end], a[n:end], b[n:end], step)

    def _decode(self, mixed: Tensor, a: Tensor, b: Tensor, step: Any) -> Tensor:
        """Return the outputs `[N, HV, V]` for one token of each request."""
        convs, weights, states = self._in_slots()
        # vLLM pads the batch of a CUDA graph with slot 0, which belongs to no request
        slots = step.non_spec_state_indices_tensor[: len(mixed)]
        slots = torch.where(slots > 0, slots, -1)
        xs = mixed.split(self.sizes, -1)
        found = short_conv_steps(xs, weights, convs, slots=slots, activation="silu")
        q, k, v, g, beta = (x.squeeze(1) for x in self._heads(*(x.unsqueeze(1) for x in (*found, a, b))))
        o = gated_delta_rule_step(q, k, v, g, beta, states, slots=slots, scale=self.scale, qk_l2norm=True)
        return self.fit.outputs(o.unsqueeze(1), self.value_heads).squeeze(1)

    def _prefill(self, mixed: Tensor, a: Tensor, b: Tensor, step: Any) -> Tensor:
        """Return the outputs `[T, HV, V]` for the packed tokens of prompts."""
        convs, weights, states = self._in_slots()
        options: dict[str, Any] = {"slots": step.prefill_state_indices, "fresh": ~step.prefill_has_initial_state}
        options["cu_seqlens"] = step.prefill_query_start_loc
        xs = mixed.unsqueeze(0).split(self.sizes, -1)
        found = short_convs_prefill(xs, weights, convs, activation="silu", **options)
        q, k, v, g, beta = self._heads(*found, *[x.unsqueeze(0) for x in (a, b)])
        o = gated_delta_rule_prefill(q, k, v, g, beta, states, scale=self.scale, qk_l2norm=True, **options)
        return self.fit.outputs(o, self.value_heads)[0]

    def _in_slots(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Return the last inputs of the convolutions of q, k and v, the convolutions' weights, and the states."""
        layer: Any = self
        weight = layer.conv1d.weight.flatten(1)
        conv, states = (x.flatten(1) for x in layer.kv_cache)
        conv = conv.unflatten(1, (len(weight), -1))
        shape = self.fit.state_shape(self.value_heads)
        return conv.split(self.sizes, 1), weight.split(self.sizes), states.unflatten(1, shape)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v, log decay and β `[B, T, heads, ...]`, with heads padded or split to sizes of our kernels."""
        layer: Any = self
        g, beta = delta_gates(a, b, layer.A_log, layer.dt_bias, max_beta=self.max_beta)
        fit = self.fit
        q, k = (fit.keys(x.unflatten(-1, (-1, fit.key_size))) for x in (q, k))
        return q, k, fit.values(v.unflatten(-1, (-1, fit.value_size))), fit.gates(g), fit.gates(beta)


def register_layers() -> None:
    """Register our subclasses of vLLM's layers, unless another plug-in has registered one."""
    from vllm.model_executor.custom_op import op_registry_oot  # pyright: ignore[reportMissingImports]

    for layer in (OlmoHybridGatedDeltaNetAttention, QwenGatedDeltaNetAttention):
        if layer.__name__ in op_registry_oot:
            logger.warning("tokenmix: another plug-in has replaced %s", layer.__name__)
            continue
        layer.register_oot(type(f"Tokenmix{layer.__name__}", (_OurKernels, layer), {}))
