"""The backbone: a model of blocks, each with a token mixer and, unless `intermediate_size` is 0, a SwiGLU."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.generic import can_return_tuple

from tokenmix_core.modeling.attn_implementation import ChoosesAttention, choose_attention
from tokenmix_core.modeling.auxiliary import AuxiliaryLoss, report_uncounted
from tokenmix_core.modeling.cache import HybridCache
from tokenmix_core.modeling.cache_name import NAMES, CacheOutput, takes_either_name
from tokenmix_core.modeling.checkpoint import CheckedLoading
from tokenmix_core.modeling.config import HybridConfig
from tokenmix_core.modeling.packing import begin_call, rolls_back
from tokenmix_core.modeling.rows import keeps_rows, rows_for_hooks
from tokenmix_core.modeling.split_rows import check_split
from tokenmix_core.nn.dtypes import KeepsFloat32
from tokenmix_core.nn.init import init_weights_
from tokenmix_core.nn.mixer import Mixer
from tokenmix_core.nn.mlp import SwiGLU
from tokenmix_core.nn.norm import RMSNorm, add_and_norm
from tokenmix_core.nn.plain import is_plain, refuse_meta
from tokenmix_core.nn.registry import find_mixer
from tokenmix_core.nn.rotary import RotaryEmbedding
from tokenmix_core.nn.state import Bounds, Span
from tokenmix_core.parallel import SequenceShard, current_shard, sequence_shard


@dataclass
class HybridOutput(CacheOutput):
    """The output of the backbone.

    Attributes:
        last_hidden_state: `[B, T, D]`, normalised; zero at padding.
        cache: the cache, if one is kept; `past_key_values` is the same object.
        hidden_states: with `output_hidden_states`, the embeddings and every layer's output, the last one after the
            norm.
        auxiliary: the mixers' auxiliary tensors by name, stacked over layers; a tuple if their shapes differ.
        cu_seqlens: boundaries of packed documents, from whichever argument of the call gave them.
        attentions: always None; transformers' classification heads read it.
    """

    attentions: ClassVar[None] = None
    last_hidden_state: Tensor | None = None
    cache: HybridCache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    auxiliary: dict[str, Tensor | tuple[Tensor, ...]] | None = None
    cu_seqlens: Tensor | None = None


class HybridBlock(GradientCheckpointingLayer):
    """x ← x + mixer(norm(x)); x ← x + mlp(norm(x)). The second step is omitted if `intermediate_size` is 0."""

    def __init__(self, config: HybridConfig, mixer: Mixer):
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps) if config.intermediate_size else None
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size) if config.intermediate_size else None

    def forward(
        self,
        hidden_states: Float[Tensor, "B T D"],
        branch: Float[Tensor, "B T D"] | None = None,
        *,
        defer: bool = False,
        rows: Span | None = None,
        shard: SequenceShard | None = None,
        layer: int | None = None,
        **mixer_args: Any,
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Return the residual stream after the block, None (see `defer`), and the mixer's auxiliary tensors.

        With `defer`, the block's last addition is left to the next block: it returns the addend instead of None, and
        the next block takes the addend as `branch` and adds it in the kernel of its first norm. With `rows` (without
        `branch` and `defer`), inputs and outputs have padding, which is removed inside the block. With `shard`, inputs
        and outputs are one rank's tokens of split rows; `shard` is an argument because gradient checkpointing calls the
        block again, outside the context of `sequence_shard`.
        """
        if shard is not None:
            with sequence_shard(shard, layer):
                return self._mix(hidden_states, branch, defer, mixer_args)
        if rows is None:
            return self._mix(hidden_states, branch, defer, mixer_args)
        with rows_for_hooks(self.modules(), rows):
            hidden_states, _, auxiliary = self._mix(rows.pack(hidden_states), None, False, mixer_args)
        return rows.unpack(hidden_states), None, auxiliary

    def _mix(
        self, hidden_states: Tensor, branch: Tensor | None, defer: bool, mixer_args: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        y, hidden_states = add_and_norm(self.mixer_norm, hidden_states, branch)
        mixed, auxiliary = self.mixer(y, **mixer_args)
        if self.mlp is None or self.mlp_norm is None:
            last = mixed
        else:
            y, hidden_states = add_and_norm(self.mlp_norm, hidden_states, mixed)
            last = self.mlp(y)
        if defer:
            return hidden_states, last, auxiliary or {}
        return hidden_states + last, None, auxiliary or {}


class HybridPreTrainedModel(ChoosesAttention, CheckedLoading, PreTrainedModel):
    """Base class of the models, with the class attributes that transformers reads."""

    config: HybridConfig
    config_class = HybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HybridBlock"]  # noqa: RUF012
    _skip_keys_device_placement = list(NAMES)  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        init_weights_(module, self.config.initializer_range)

    def state_bounds(self, seq_len: int, batch_size: int = 1, dtype: torch.dtype | None = None) -> Bounds:
        """Return the minimum and maximum bytes of a cache for `batch_size` sequences of `seq_len` tokens."""
        dtype, backbone = self.dtype if dtype is None else dtype, cast(HybridModel, self.base_model)
        return Bounds.sum(mixer.state_bounds(seq_len, batch_size, dtype) for mixer in backbone.mixers)

    def state_bytes(self, seq_len: int, batch_size: int = 1, dtype: torch.dtype | None = None) -> int:
        """Return the maximum bytes of a cache; see `state_bounds`."""
        return self.state_bounds(seq_len, batch_size, dtype).most


class HybridModel(HybridPreTrainedModel):
    """Embedding, blocks and a final norm.

    `register_mixer` makes further mixers available by their names in the configuration.
    """

    def __init__(self, config: HybridConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        mixers = [
            find_mixer(config.mixer_type(i)).from_config(config, i, **config.options_of(i))
            for i in range(config.num_hidden_layers)
        ]
        choose_attention(mixers, config._attn_implementation)
        # maps each extra input to the mixer class that converts it
        self.input_takers = _input_takers(mixers)
        self.layers = nn.ModuleList(HybridBlock(config, mixer) for mixer in mixers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        # one table of rotation angles per head size, shared by all layers
        self.rotary = nn.ModuleDict(
            {
                str(dim): RotaryEmbedding(dim, config.rope_parameters or {}, config.max_position_embeddings)
                for dim in sorted({m.rotary_dim for m in mixers if m.rotary_dim is not None})
            }
        )
        self.gradient_checkpointing = False
        # auxiliary losses of training calls whose caller did not add them; None outside `auxiliary.collected_losses`
        self.auxiliary_losses: list[AuxiliaryLoss] | None = None
        self.warned_of_losses = False
        # these tensors stay in float32 when a checkpoint is loaded in 16 bits
        self._keep_in_fp32_modules_strict = {
            f"{path}.{name}"
            for path, module in self.named_modules()
            if isinstance(module, KeepsFloat32)
            for name in module.float32
        }
        self.post_init()

    @property
    def _blocks(self) -> list[HybridBlock]:
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def mixers(self) -> list[Mixer]:
        """The mixers of all layers."""
        return [layer.mixer for layer in self._blocks]

    def make_cache(self, max_length: int = 0, *, offload: bool = False, record: int | None = None) -> HybridCache:
        """Return an empty cache; the arguments are those of `HybridCache`."""
        # make a list, because torch 2.11 cannot reconstruct a traced generator after a graph break
        states = [mixer.make_state() for mixer in self.mixers]
        return HybridCache(states, max_length=max_length, offload=offload, record=record)

    @takes_either_name
    @can_return_tuple
    @rolls_back
    def forward(
        self,
        input_ids: Int[Tensor, "B T"] | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Int[Tensor, "B T"] | None = None,
        cu_seqlens: Int[Tensor, "N_plus_1"] | None = None,
        cache: HybridCache | None = None,
        inputs_embeds: Float[Tensor, "B T D"] | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        losses_counted: bool = False,
        appended: bool = False,
        **mixer_inputs: Any,
    ) -> HybridOutput:
        """Run the backbone.

        Args:
            input_ids: `[B, T]`; or give `inputs_embeds [B, T, D]` instead.
            attention_mask: `[B, T]`, or `[B, past + T]` with a cache: zero for padding, on the left or the right of a
                row. Padding is removed before the layers run, for which the host waits for the device once per call; a
                decoding step after real tokens is assumed to contain no padding. Under torch.compile the host cannot
                wait: padding is moved behind the real tokens and computed.
            position_ids: `[B or 1, T]`, rotary positions; by default the token's index in its sequence without padding.
                In a single row without a cache and padding, a document begins where positions do not increase, as in
                transformers' DataCollatorWithFlattening; in all other calls they must increase, which a compiled graph
                does not check. Finding these boundaries synchronises once, which `cu_seqlens` avoids.
            cu_seqlens: `[N + 1]`, boundaries of packed sequences (B = 1); for training and scoring, without a cache.
                The collator's `cu_seq_lens_q` and `cu_seq_lens_k` are synonyms, `seq_idx [1, T]` is another form;
                `max_length_q` and `max_length_k` are accepted and ignored.
            cache: the cache of an earlier call; updated. `past_key_values` is a synonym.
            use_cache: whether to keep a cache; by default the configuration's value in evaluation mode, and False in
                training mode, for packed documents, and in a compiled graph with an attention_mask.
            output_hidden_states: whether to return all layers' outputs; by default the configuration's value.
            output_attentions: must not be True, because the kernels do not store attention weights.
            losses_counted: whether the caller adds the auxiliary losses to its own loss; if not, training warns once.
            appended: whether `cu_seqlens` is the end of one row, before appended tokens (`modeling.lengths`); then only
                mixers with `bounds_more_tokens` get it.
            mixer_inputs: extra inputs of the mixers by name. None counts as not given; an unknown name is ignored if
                its value is None or False, because libraries pass options in this way.

        Inside `parallel.sequence_shard` the inputs are whole rows, equal on all ranks; outputs are this rank's tokens.

        Raises:
            ValueError: inputs that do not fit together; the message names the given and the expected ones.
        """
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise ValueError("output_attentions=True is not available: the kernels do not form attention weights")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        shard = current_shard()
        if shard is not None:
            whole, given = input_ids if inputs_embeds is None else inputs_embeds, (position_ids, cu_seqlens)
            check_split(shard, self.mixers, whole, (attention_mask, *given), cache, use_cache)
            use_cache, input_ids = False, None if input_ids is None else shard.split(input_ids)
            inputs_embeds = None if inputs_embeds is None else shard.split(inputs_embeds)
        hidden = self._embed(input_ids, inputs_embeds)
        call = begin_call(
            self,
            # pass an empty tensor that has the layout of the whole rows
            hidden if shard is None else hidden.new_empty(len(hidden), shard.tokens, 0),
            mixer_inputs,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seqlens=cu_seqlens,
            cache=cache,
            use_cache=use_cache,
        )
        self._check_inputs(mixer_inputs)
        span, cache = call.span, call.cache
        boundaries = call.document_cu_seqlens
        if shard is not None:
            boundaries = shard.row_cu_seqlens(hidden.device)
            call = call._replace(position_ids=shard.positions(hidden.device).unsqueeze(0))
        mixer_inputs = self.prepare_mixer_inputs(mixer_inputs, span, boundaries, cache)
        packed, branch, seen = span.pack(hidden), None, [hidden]
        rows = span if keeps_rows(self, span) else None
        real, hidden = packed.shape[1], packed if rows is None else hidden
        auxiliary: dict[str, list[Tensor]] = {}
        if real:
            cu_seqlens = call.cu_seqlens
            rotary = {int(dim): table(call.position_ids) for dim, table in self.rotary.items()}
            alone = bool(output_hidden_states) or rows is not None
            deferring = [False] * len(self._blocks) if alone else self._deferring()
            for i, layer in enumerate(self._blocks):
                args = {name: mixer_inputs[name] for name in layer.mixer.inputs if name in mixer_inputs}
                bounds = None if appended and not layer.mixer.bounds_more_tokens else cu_seqlens
                args |= {"cu_seqlens": bounds, "rotary": rotary.get(layer.mixer.rotary_dim or 0)}
                if rows is not None:
                    args["rows"] = rows
                if deferring[i]:
                    args["defer"] = True
                if shard is not None:
                    args |= {"shard": shard, "layer": i}
                # pass positional arguments, because checkpointing computes gradients only for these
                stream = (hidden,) if branch is None else (hidden, branch)
                if cache is None:
                    hidden, branch, more = layer(*stream, **args)
                else:
                    hidden, branch, more = layer(*stream, state=cache.acquire(i, hidden.device), **args)
                    cache.release(i)
                for name, value in more.items():
                    if span.keeps_padding and name.endswith("_loss"):
                        raise ValueError(
                            f"a compiled graph cannot exclude padding from the mixers' {name}: pack the rows into one, "
                            "with cu_seqlens and no attention_mask"
                        )
                    if not span.empty:
                        auxiliary.setdefault(name, []).append(value)
                    elif name.endswith("_loss"):
                        # add zeros that depend on the parameters, so that these get zero gradients
                        auxiliary.setdefault(name, []).append(value.masked_fill(torch.ones_like(value).bool(), 0))
                if output_hidden_states:
                    seen.append(span.unpack(hidden if rows is None else span.pack(hidden)))
        hidden = self.norm(hidden)
        hidden = span.unpack(hidden if rows is None else span.pack(hidden))
        if cache is not None:
            cache.end()
        stacked = {name: _stacked(values) for name, values in auxiliary.items()} or None
        if not losses_counted:
            report_uncounted(self, stacked, packed.shape[0] * packed.shape[1])
        return HybridOutput(
            last_hidden_state=hidden,
            cache=cache,
            hidden_states=(*seen[:-1], hidden) if output_hidden_states else None,
            auxiliary=stacked,
            cu_seqlens=call.document_cu_seqlens,
        )

    def flops_per_token(self, seq_len: int) -> float:
        """Return the forward FLOPs per token of the layers at this context length."""
        mlps = sum(2.0 * p.numel() for layer in self._blocks if layer.mlp is not None for p in layer.mlp.parameters())
        return mlps + sum(mixer.flops_per_token(seq_len) for mixer in self.mixers)

    def _deferring(self) -> list[bool]:
        """Return for each block whether the next block's norm adds this block's last branch; true if both are plain."""
        unseen = [is_plain(HybridBlock, layer) for layer in self._blocks]
        return [*(a and b for a, b in itertools.pairwise(unseen)), False]

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        x, dims = (input_ids, 2) if inputs_embeds is None else (inputs_embeds, 3)
        if x is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("expected exactly one of input_ids and inputs_embeds")
        if x.dim() != dims or not x.shape[0] or not x.shape[1]:
            name, shape = ("input_ids", "[B, T]") if inputs_embeds is None else ("inputs_embeds", "[B, T, D]")
            raise ValueError(f"{name} must have shape {shape} with B and T at least 1, got {list(x.shape)}")
        if inputs_embeds is not None:
            return x
        refuse_meta(x, self.embed_tokens)
        return self.embed_tokens(x)

    def _check_inputs(self, mixer_inputs: dict[str, Any]) -> None:
        asked = {name for name, x in mixer_inputs.items() if x is not None and x is not False}
        if unknown := sorted(asked - set(self.input_takers)):
            known = ", ".join(self.input_takers) or "none"
            raise ValueError(
                f"{type(self).__name__}.forward: unknown input {', '.join(map(repr, unknown))}; "
                f"inputs of the mixers are: {known}"
            )

    def inputs_to_keep(self, inputs: dict[str, Any], cache: HybridCache) -> dict[str, Any]:
        """Return the extra inputs as a cache's history stores them, to compute tokens again after `crop`.

        Override this for inputs that depend on the model or the call. Tensors `[B, T, ...]` have a value for each
        token.
        """
        return {name: x for name, x in inputs.items() if x is not None}

    def prepare_mixer_inputs(
        self, inputs: dict[str, Any], span: Span, cu_seqlens: Tensor | None, cache: HybridCache | None
    ) -> dict[str, Any]:
        """Convert extra inputs to the layers' form; override this for inputs that depend on the model or the cache.

        Args:
            inputs: the caller's inputs.
            span: token layout of the call.
            cu_seqlens: boundaries of packed sequences.
            cache: the call's cache, or None.
        """
        takers = self.input_takers
        given = {name: x for name, x in inputs.items() if name in takers and x is not None}
        return {name: takers[name].prepare_input(name, x, span, cu_seqlens) for name, x in given.items()}


def _input_takers(mixers: list[Mixer]) -> dict[str, type[Mixer]]:
    takers: dict[str, type[Mixer]] = {}
    for kind in dict.fromkeys(map(type, mixers)):
        for name in kind.inputs:
            first = takers.setdefault(name, kind)
            if first.prepare_input.__func__ is not kind.prepare_input.__func__:
                raise ValueError(
                    f"{first.__name__} and {kind.__name__} take an input {name!r} in different forms; they cannot "
                    "be combined in one model"
                )
    return takers


def _stacked(values: list[Tensor]) -> Tensor | tuple[Tensor, ...]:
    """Stack the tensors of several layers, or return them as a tuple if their shapes differ."""
    return torch.stack(values) if len({x.shape for x in values}) == 1 else tuple(values)
