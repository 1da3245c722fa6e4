"""Give hooks and adapters rows with padding, `[B, T, D]`, although the layers compute only the real tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tokenmix_core.chunking import cdiv, chunk_slots
from tokenmix_core.kernels.launch import compat
from tokenmix_core.nn.plain import has_hooks, is_third_party
from tokenmix_core.nn.state import Span


def keeps_rows(model: nn.Module, span: Span) -> bool:
    """True if the call has padding to remove and a module has hooks or a `forward` set on it, which expect whole rows.

    Checks all modules, once for each call with padding. False under torch.compile.
    """
    if span.mask is None or span.keeps_padding or torch.compiler.is_compiling():
        return False
    return compat.watches_all_modules() or any(map(_is_watched, model.modules()))


class PacksRows:
    """Base class to list before a layer of another library: it takes and returns rows, but computes packed tokens.

    `forward` itself enters `rows_for_hooks`, so that hooks also see rows when gradient checkpointing runs it again.
    """

    modules: Callable[[], Iterator[nn.Module]]

    def forward(self, hidden_states: Tensor, *args: Any, rows: Span | None = None, **given: Any) -> Tensor:
        """Run the layer; if `rows` is given, padding is removed inside."""
        compute: Any = super().forward  # type: ignore[misc]
        if rows is None:
            return compute(hidden_states, *args, **given)
        with rows_for_hooks(self.modules(), rows):
            return rows.unpack(compute(rows.pack(hidden_states), *args, **given))


@contextmanager
def rows_for_hooks(modules: Iterable[nn.Module], span: Span) -> Iterator[None]:
    """Context manager: modules with hooks see `[B, T, ...]`, zero at padding, instead of packed `[1, total, ...]`.

    Hooks get rows, and so does the module's own `forward`, because an adapter may compute per row. Only a module that
    mixes along time, recognised by its argument `cu_seqlens`, computes packed tokens although its hooks get rows. A
    module of another library whose submodules have hooks also computes rows, because it may flatten tokens before it
    calls them. Modules that a mixer names in `per_chunk` see rows of chunks, `[B, ⌈T / chunk⌉, ...]`.
    """
    everything, modules = compat.watches_all_modules(), list(modules)
    chunks: dict[int, Any] = {id(getattr(m, name)): m.chunk for m in modules for name in getattr(m, "per_chunk", ())}
    with ExitStack() as stack:
        for module in modules:
            if (
                everything
                or _is_watched(module)
                or (is_third_party(module) and any(map(_is_watched, module.modules())))
            ):
                stack.enter_context(
                    compat.call_replaced(module, lambda call, m=module: _in_rows(m, call, span, chunks))
                )
        yield


def _is_watched(module: nn.Module) -> bool:
    # accelerate also sets a `forward` on modules, but it only loads weights and works for any shape
    own = "forward" in module.__dict__ and not hasattr(module, "_hf_hook")
    return own or has_hooks(module)


def _in_rows(module: nn.Module, call: Callable, span: Span, chunks: dict[int, int]) -> Callable:
    layout = _Chunks(span, chunks[id(module)]) if id(module) in chunks else span
    packed_shape, rows_shape = (1, len(span.index)), (span.batch, span.tokens)
    if isinstance(layout, _Chunks):
        packed_shape, rows_shape = (1, layout.slots), tuple(layout.real.shape)

    def pack(x: Any) -> Any:
        return _mapped(x, rows_shape, layout.pack)

    def unpack(x: Any) -> Any:
        return _mapped(x, packed_shape, layout.unpack)

    def in_rows(*args: Any, **kwargs: Any) -> Any:
        if "cu_seqlens" not in kwargs:
            return pack(call(*unpack(args), **unpack(kwargs)))
        forward, own = module.forward, module.__dict__.get("forward")
        module.__dict__["forward"] = lambda *a, **k: unpack(forward(*pack(a), **pack(k)))
        try:
            return pack(call(*unpack(args), **unpack(kwargs)))
        finally:
            del module.__dict__["forward"]
            if own is not None:
                module.__dict__["forward"] = own

    return in_rows


class _Chunks:
    """Converts the chunks of a padded call between two layouts: packed (`chunking.slot_ids`) and padded rows."""

    def __init__(self, span: Span, chunk: int) -> None:
        assert span.mask is not None
        cu_seqlens: Any = span.cu_seqlens
        within = torch.arange(cdiv(span.tokens, chunk), device=span.device)
        self.real = within * chunk < span.mask.sum(1, keepdim=True)
        starts = cu_seqlens[:-1] // chunk + torch.arange(span.batch, device=span.device)
        self.index = (starts.unsqueeze(1) + within)[self.real]
        self.slots = chunk_slots(1, len(span.index), chunk, cu_seqlens)

    def unpack(self, x: Tensor) -> Tensor:
        return x.new_zeros(*self.real.shape, *x.shape[2:]).index_put((self.real,), x[0, self.index])

    def pack(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.slots, *x.shape[2:]).index_put((self.index,), x[self.real]).unsqueeze(0)


def _mapped(x: Any, shape: tuple[int, ...], change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to each tensor in x with first dimensions `shape`, also inside tuples, lists and dictionaries."""
    if isinstance(x, Tensor):
        return change(x) if x.dim() > 1 and tuple(x.shape[:2]) == shape else x
    if type(x) in (tuple, list):
        return type(x)(_mapped(y, shape, change) for y in x)
    return {name: _mapped(y, shape, change) for name, y in x.items()} if type(x) is dict else x
