"""Launches without Triton's own search for the compiled kernel, which costs more host time than the launch itself."""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

from tokenmix_core.kernels.launch import compat, flags, forms, pdl
from tokenmix_core.kernels.launch.cache.driver import Loaded, launch, loaded, packed
from tokenmix_core.kernels.launch.errors import compiling
from tokenmix_core.kernels.launch.pdl import PDL

# a kernel, its grid, arguments in the order of its parameters, and options of the launch
Launch = tuple[Any, tuple[int, ...], tuple, dict[str, Any]]

# with the parameter goes an option of the launch
_BEGINS_EARLY, _WAITS_ITS_TURN = {PDL: True, "launch_pdl": True}, {PDL: False}
# compiled forms remembered by a kernel; beyond that many the first are forgotten
_REMEMBERED = 1024


def cached_launch(kernel):
    """A decorator above `triton.jit`: the kernel is launched as before, but faster from the second time on.

    Triton compiles a kernel anew for other dtypes, for other alignments of pointers, for other divisibilities of
    numbers, and inspects every argument at every launch to find the right one. Here what it distinguishes by is the
    key (`forms.py`), so that a call with other numbers, such as a length that never was, is one look-up, too. All
    parameters must be given at each launch, in order or by name, which makes no difference. The interpreter's kernels
    stay as they are.
    """
    if not isinstance(kernel, triton.JITFunction):
        return kernel
    if torch.cuda.is_initialized():
        _begun()
    compat.choose_compiler_options(kernel)
    return _Launcher(kernel)


@functools.cache
def _begun() -> list[Future]:
    """Do what comes once before a first kernel, mostly outside Python, so that other modules are imported meanwhile.

    A compiler in C makes what Triton asks the driver by, and what launches; Triton's own compiler is hashed.
    """
    pool = ThreadPoolExecutor(3)
    begun = [pool.submit(x) for x in (*compat.prepare(), launch)]
    pool.shutdown(wait=False)
    return begun


@contextmanager
def compiled_together() -> Iterator[Callable]:
    """Gives `launch(kernel, grid, *args, **options)`, which launches in turn, at the end of the block.

    By then all kernels are known, so that the new ones are compiled side by side.
    """
    launches: list[Launch] = []

    def add(kernel, grid, *args, **options):
        if isinstance(kernel, _Launcher):
            args, options = kernel.in_order(args, options)
        launches.append((kernel, grid, args, options))

    yield add
    launch_together(launches)


def launch_together(launches: list[Launch], foreseen: Sequence[Launch] = ()) -> None:
    """Launch in turn, after making those kernels of `cached_launch` that are new side by side, where Triton can.

    That takes seconds a kernel, mostly outside Python: first they are compiled, then put on the device. So are those of
    launches that are `foreseen`.
    """
    new = [] if _taker.take is not None else [x for x in (*launches, *foreseen) if _is_new(*x)]
    together = compat.side_by_side()
    if len(new) > 1 and together is not None and all(compat.can_drop(kernel.fn) for kernel, *_ in new):
        device = current_device()
        wait(_begun())
        with ThreadPoolExecutor(len(new)) as pool:
            with together(pool, ignore_errors=True):
                chosen = [kernel.form(args, options)[1] for kernel, _, args, options in new]
                made = [
                    form.warmup(*args, grid=grid, **options)
                    for form, (_, grid, args, options) in zip(chosen, new, strict=True)
                ]
            loads = [pool.submit(_load, kernel, device) for kernel in made]
        for (launcher, _, args, options), form, compiled, load in zip(new, chosen, made, loads, strict=True):
            if load.exception() is None:
                launcher.keep(load.result(), args, options)
            else:
                # that happens once in thousands: the launch compiles it by itself, or says why not
                compat.drop(form, compiled)
    for kernel, grid, args, options in launches:
        kernel[grid](*args, **options)


def _is_new(kernel: Any, _grid: tuple, args: tuple, options: dict) -> bool:
    return isinstance(kernel, _Launcher) and not kernel.knows(args, options)


def _load(kernel: Any, device: int) -> Loaded | None:
    """Put what was compiled on a device."""
    # a thread begins on the first device
    with torch.cuda.device(device):
        return loaded(compat.result(kernel), device)


class _Taker(threading.local):
    take: Callable[[Launch], None] | None = None


_taker = _Taker()


@contextmanager
def taken(take: Callable[[Launch], None] | None) -> Iterator[None]:
    """Launches of this thread by `cached_launch` are handed to `take` instead; None: they are made."""
    before, _taker.take = _taker.take, take
    try:
        yield
    finally:
        _taker.take = before


current_device, current_stream = compat.current_device, compat.current_stream
# whether something, such as a profiler, wants to be told of launches by Triton itself
observed = compat.observing()


def replays_on(device: int) -> int | None:
    """The stream of launches of this thread, if they are made on a device, and nobody has to see each of them.

    Launches that may begin early are others than those that were recorded.
    """
    seen = not flags.on or _taker.take or observed() or pdl.asked.on
    return None if seen or current_device() != device else current_stream(device)


class _Launcher:
    def __init__(self, kernel: triton.JITFunction) -> None:
        self.fn = kernel
        self.__doc__ = kernel.__doc__
        # by how many arguments are given in order and which by name: what puts the latter in order, and other names
        self._orders: dict[tuple, tuple[Callable | None, tuple[str, ...]]] = {}
        # by what a kernel is compiled for, the form that is launched, None where only Triton can, and whether it is one
        # for all lengths
        self._loaded: dict[tuple, tuple[Loaded | None, bool]] = {}
        self._forms = forms.Forms(kernel)
        # of a kernel that supports programmatic dependent launch, how many arguments leave out PDL
        names = compat.argument_names(kernel)
        if PDL in names[:-1]:
            raise TypeError(f"{names[-1]} follows {PDL}, which must be the last parameter")
        self._without_early = len(names) - 1 if PDL in names else -1

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **options: self._launch(grid, *self.in_order(args, options))

    def in_order(self, args: tuple, options: dict) -> tuple[tuple, dict]:
        """All arguments in the order of the kernel's parameters, and options of the launch.

        A missing argument is a TypeError, and so is one that is given twice. PDL is given here.
        """
        if len(args) <= self._without_early and PDL not in options:
            options = {**options, **(_BEGINS_EARLY if pdl.asked.on else _WAITS_ITS_TURN)}
        kind = len(args), *options
        found = self._orders.get(kind)
        if found is None:
            found = self._orders[kind] = self._order(len(args), options)
        named, others = found
        if named is None:
            return args, options
        return (*args, *named(options)), {name: options[name] for name in others}

    def _order(self, given: int, options: dict) -> tuple[Callable | None, tuple[str, ...]]:
        names = compat.argument_names(self.fn)
        missing = [name for name in names[given:] if name not in options]
        twice = [name for name in names[:given] if name in options]
        if missing or twice or given > len(names):
            wrong = f"misses {missing}" if missing else f"is given {twice} twice" if twice else "is given too much"
            raise TypeError(f"{self.fn.__name__} {wrong}; its parameters are {', '.join(names)}")
        if given == len(names):
            return None, ()
        wanted = names[given:]
        # of one name an itemgetter makes no tuple
        named = operator.itemgetter(*wanted) if len(wanted) > 1 else lambda options: (options[wanted[0]],)
        return named, tuple(name for name in options if name not in wanted)

    def form(self, args: tuple, options: dict) -> tuple[tuple, Any]:
        """The key and the kernel to compile for such a call."""
        key = self._forms.key(current_device(), args, options)
        if key in self._loaded and not (forms.asked() and self._loaded[key][1]):
            return key, self.fn
        return (None if forms.asked() else self._forms.general(key, args)) or (key, self.fn)

    def knows(self, args: tuple, options: dict) -> bool:
        """Tell whether a kernel for such a call was kept."""
        key = self.form(args, options)[0]
        return key in self._loaded and not (forms.asked() and self._loaded[key][1])

    def keep(self, kernel: Loaded | None, args: tuple, options: dict) -> None:
        """Launch such calls by this kernel."""
        key = self.form(args, options)[0]
        exact = self._forms.key(current_device(), args, options)
        # the next call with these numbers finds it at once
        for found in (key, exact):
            self._loaded[found] = kernel, key != exact
        while len(self._loaded) > _REMEMBERED:
            del self._loaded[next(iter(self._loaded))]
        compat.say_what_is_missing()

    def packing(self, grid: tuple[int, ...], args: tuple, options: dict) -> Callable[[dict], bytes] | None:
        """`pack(places)` of a call whose kernel was kept, for `driver.launch`; None where only Triton can launch it.

        `pack.general` tells whether the kernel is the form for all lengths.
        """
        kernel, general = self._loaded[self._forms.key(current_device(), args, options)]
        if kernel is None:
            return None
        pack: Any = functools.partial(packed, kernel, grid, [0 if isinstance(x, Tensor) else x for x in args])
        pack.general = general
        return pack

    def _launch(self, grid: tuple[int, ...], args: tuple, options: dict) -> None:
        if _taker.take is not None:
            _taker.take((self, grid, args, options))
            return
        key = self._forms.key(current_device(), args, options)
        found = self._loaded.get(key)
        if found is None or (found[1] and forms.asked()):
            kernel = self._compile(grid, args, options)
        else:
            kernel = found[0]
        # what profilers hook into launches is called by Triton's own way alone
        start = None if kernel is None or observed() else launch()
        if kernel is None or start is None:
            with compiling(self.fn):
                self.fn[grid](*args, **options)
        elif words := packed(kernel, grid, [x.data_ptr() if isinstance(x, Tensor) else x for x in args], {}):
            start(words, current_stream(key[0]))

    def _compile(self, grid: tuple[int, ...], args: tuple, options: dict) -> Loaded | None:
        """Find, or compile, and keep the kernel of calls like this; None where only Triton can launch it."""
        key, form = self.form(args, options)
        if self.knows(args, options):
            kernel = self._loaded[key][0]
        elif compat.launching() is None:
            kernel = None
        else:
            wait(_begun())
            kernel = self._compiled(form, grid, args, options)
        self.keep(kernel, args, options)
        return kernel

    def _compiled(self, form: Any, grid: tuple[int, ...], args: tuple, options: dict) -> Loaded | None:
        if form is not self.fn:
            try:
                return _load(form.warmup(*args, grid=grid, **options), current_device())
            # a kernel may need to know more of its numbers: the one for these says by itself if it does not compile
            except Exception:
                self._forms.refuse(form)
        with compiling(self.fn):
            return _load(self.fn.warmup(*args, grid=grid, **options), current_device())
