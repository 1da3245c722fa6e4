"""Launch kernels without Triton's own lookup of the compiled kernel, which takes longer than the launch itself."""

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

from tokenmix_core.kernels.launch import compat, fit, flags, forms, pdl
from tokenmix_core.kernels.launch.cache.driver import Loaded, launch, loaded, packed
from tokenmix_core.kernels.launch.errors import compiling
from tokenmix_core.kernels.launch.pdl import PDL

# a launch: a kernel, its grid, its arguments in order, and Triton's options
Launch = tuple[Any, tuple[int, ...], tuple, dict[str, Any]]

# a kernel with PDL=True must be launched with Triton's option `launch_pdl`
_WITH_PDL, _WITHOUT_PDL = {PDL: True, "launch_pdl": True}, {PDL: False}
# maximum number of keys under which a kernel's compiled versions are stored; the oldest key is dropped
_MAX_FORMS = 1024


def cached_launch(kernel=None, *, loop_tiles: tuple[str, ...] = ()) -> Any:
    """Decorate a `triton.jit` kernel so that launches after the first one have less CPU overhead.

    Triton compiles a kernel again for other dtypes, alignments of pointers and divisibilities of integers, and inspects
    every argument at every launch. Here these properties form a key (`forms.py`), so that one lookup finds the compiled
    kernel, even for new lengths. All parameters must be given at each launch, in order or by name. Interpreted kernels
    are returned unchanged.

    A portable kernel that exceeds the device's shared memory is compiled with fewer pipeline stages, then with smaller
    `loop_tiles` (`fit.py`): constexprs that neither the grid nor any tensor's shape depends on.
    """
    if kernel is None:
        return functools.partial(cached_launch, loop_tiles=loop_tiles)
    if not isinstance(kernel, triton.JITFunction):
        return kernel
    if torch.cuda.is_initialized():
        _prepared()
    compat.choose_compiler_options(kernel)
    return _Launcher(kernel, loop_tiles)


@functools.cache
def _prepared() -> list[Future]:
    """Start the work that the first kernel needs, mostly outside Python, while other modules are imported.

    The work is to compile Triton's driver module and the launcher in C, and to hash Triton's compiler.
    """
    pool = ThreadPoolExecutor(3)
    begun = [pool.submit(x) for x in (*compat.prepare(), launch)]
    pool.shutdown(wait=False)
    return begun


@contextmanager
def compiled_together() -> Iterator[Callable]:
    """Yield `launch(kernel, grid, *args, **options)`, which postpones launches to the end of the block.

    At the end all kernels are known, so that uncompiled kernels are compiled in parallel.
    """
    launches: list[Launch] = []

    def add(kernel, grid, *args, **options):
        if isinstance(kernel, _Launcher):
            args, options = kernel.in_order(args, options)
        launches.append((kernel, grid, args, options))

    yield add
    launch_together(launches)


def launch_together(launches: list[Launch], foreseen: Sequence[Launch] = ()) -> list[Callable[[dict], bytes] | None]:
    """Compile the new kernels of `launches` and `foreseen`, in parallel if Triton can, then make `launches` in order.

    `foreseen` are launches that later calls will probably make. A kernel compiles in seconds, mostly outside Python.
    Return for each launch `pack(pointers)`, see `_Launcher.launch`.
    """
    every, taken = (*launches, *foreseen), _taker.take is not None
    # read each launch's arguments once
    reads = [kernel.read(*call) if isinstance(kernel, _Launcher) and not taken else None for kernel, _, *call in every]
    new = [x for x, read in zip(every, reads, strict=True) if read is not None and not x[0].knows(*x[2:], read[0])]
    together = compat.parallel_compilation()
    if len(new) > 1 and together is not None and all(compat.can_drop(kernel.fn) for kernel, *_ in new):
        device = current_device()
        wait(_prepared())
        with ThreadPoolExecutor(len(new)) as pool:
            with together(pool, ignore_errors=True):
                chosen = [kernel.form(args, options)[1] for kernel, _, args, options in new]
                made = [
                    form.warmup(*args, grid=grid, **options)
                    for form, (_, grid, args, options) in zip(chosen, new, strict=True)
                ]
            loads = [pool.submit(_load_fitting, kernel, device, fit.shared_memory()) for kernel in made]
        for (launcher, _, args, options), form, compiled, load in zip(new, chosen, made, loads, strict=True):
            if load.exception() is None:
                launcher.keep(load.result(), args, options)
            else:
                # either the kernel needs too much shared memory or, once in thousands of times, compiling failed: let
                # the launch compile it again or raise the error
                compat.drop(form, compiled)
    return [_launched(*x, read) for x, read in zip(launches, reads, strict=False)]


def _launched(
    kernel: Any, grid: tuple[int, ...], args: tuple, options: dict, read: tuple[tuple, tuple] | None
) -> Callable[[dict], bytes] | None:
    """Make a launch; return `pack(pointers)`, None if the kernel has none. `read`: as `_Launcher.read` returns it."""
    if isinstance(kernel, _Launcher):
        return kernel.launch(grid, args, options, read)
    kernel[grid](*args, **options)
    packing = getattr(kernel, "packing", None)
    return None if packing is None else packing(grid, args, options)


def _load(kernel: Any, device: int) -> Loaded | None:
    """Load a compiled kernel on a device; return None if Triton must launch the kernel."""
    # enter the device, because a new thread starts on device 0
    with torch.cuda.device(device):
        return loaded(compat.result(kernel), device)


def _load_fitting(kernel: Any, device: int, limit: int | None) -> Loaded | None:
    """Return the result of `_load`, but raise an error if the kernel needs more than `limit` bytes of shared memory."""
    if not fit.fits(compat.result(kernel), limit):
        raise RuntimeError("too much shared memory")
    return _load(kernel, device)


class _Taker(threading.local):
    take: Callable[[Launch], None] | None = None


_taker = _Taker()


@contextmanager
def taken(take: Callable[[Launch], None] | None) -> Iterator[None]:
    """Pass this thread's launches of `cached_launch` kernels to `take` inside the block; with None, launch as usual."""
    before, _taker.take = _taker.take, take
    try:
        yield
    finally:
        _taker.take = before


current_device, current_stream = compat.current_device, compat.current_stream
# observed(): whether a hook, such as a profiler's, observes launches by Triton
observed = compat.observing()


def replays_on(device: int) -> int | None:
    """Return this thread's current stream on the device if the thread may replay captured launches there; else None.

    Launches may not be replayed if `device` is not the current one, if the launch cache is off, if a capture or a hook
    observes the launches, or if PDL is enabled: captured launches do not use PDL.
    """
    seen = not flags.on or _taker.take or observed() or pdl.enabled.on
    return None if seen or current_device() != device else current_stream(device)


class _Launcher:
    def __init__(self, kernel: triton.JITFunction, loop_tiles: tuple[str, ...] = ()) -> None:
        self.fn, self.loop_tiles = kernel, loop_tiles
        self.__doc__ = kernel.__doc__
        # maps the number of positional arguments and the names given by keyword to a function that returns the keyword
        # values that are kernel arguments, in order, and to the names of the launch's options
        self._orders: dict[tuple, tuple[Callable | None, tuple[str, ...]]] = {}
        # maps a key to the loaded kernel (None if only Triton can launch it) and to whether it is a general form
        # (`forms.py`), which serves calls with other integers
        self._loaded: dict[tuple, tuple[Loaded | None, bool]] = {}
        self._forms = forms.Forms(kernel)
        # maps device, kinds of arguments and options to the arguments by index and the options, reduced for the device
        self._fitted: dict[tuple, tuple[dict[int, Any], dict]] = {}
        # number of parameters before PDL, if the kernel has this parameter
        names = compat.argument_names(kernel)
        if PDL in names[:-1]:
            raise TypeError(f"{names[-1]} follows {PDL}, which must be the last parameter")
        self._without_pdl = len(names) - 1 if PDL in names else -1

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args, **options: self.launch(grid, *self.in_order(args, options))

    def in_order(self, args: tuple, options: dict) -> tuple[tuple, dict]:
        """Return all arguments, PDL included, in the order of the kernel's parameters, and the launch's options.

        Raises:
            TypeError: an argument is missing or given twice, or there are too many.
        """
        if len(args) <= self._without_pdl and PDL not in options:
            options = {**options, **(_WITH_PDL if pdl.enabled.on else _WITHOUT_PDL)}
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
        # a list of one name would make itemgetter return a value instead of a tuple
        named = operator.itemgetter(*wanted) if len(wanted) > 1 else lambda options: (options[wanted[0]],)
        return named, tuple(name for name in options if name not in wanted)

    def read(self, args: tuple, options: dict) -> tuple[tuple, tuple]:
        """Return the key (`forms.py`) of a call on the current device, specialised for its integers, and its values.

        The values are the arguments, with addresses instead of tensors.
        """
        return self._forms.read(current_device(), args, options)

    def form(self, args: tuple, options: dict, key: tuple | None = None) -> tuple[tuple, Any]:
        """Return key and kernel for a call: the general form (`forms.py`) if integers have varied, else specialised.

        `key` is the key that `self.read` returns, if the caller has it.
        """
        key = key or self.read(args, options)[0]
        if self._serves(key):
            return key, self.fn
        return (None if forms.asked() else self._forms.general(key, args, self._loaded)) or (key, self.fn)

    def knows(self, args: tuple, options: dict, key: tuple | None = None) -> bool:
        """Tell whether the kernel of a call with these arguments is loaded; `key` as for `form`."""
        return self._serves(self.form(args, options, key)[0])

    def _serves(self, key: tuple) -> bool:
        """Tell whether a kernel is loaded under a key, and is specialised if that is asked for."""
        found = self._loaded.get(key)
        return found is not None and not (found[1] and forms.asked())

    def keep(self, kernel: Loaded | None, args: tuple, options: dict) -> None:
        """Store a loaded kernel for calls with the key of these arguments; None if only Triton can launch them."""
        exact = self.read(args, options)[0]
        key = self.form(args, options, exact)[0]
        # store a general form under the exact key too, so that the next call with these integers needs one lookup
        self._loaded.setdefault(key, (kernel, key != exact))
        self._loaded[exact] = kernel, key != exact
        while len(self._loaded) > _MAX_FORMS:
            del self._loaded[next(iter(self._loaded))]
        compat.warn_of_missing()

    def launch(
        self, grid: tuple[int, ...], args: tuple, options: dict, read: tuple[tuple, tuple] | None = None
    ) -> Callable[[dict], bytes] | None:
        """Make a launch with arguments in order and options; `read` is the result of `self.read`, if it is known.

        Return `pack(pointers)`, which packs the launch for `driver.launch`; None if Triton must launch the kernel.
        `pack.general` tells whether the kernel is a general form (`forms.py`). Inside `taken` the launch is not made:
        `taken`'s function gets it, and the result is None.
        """
        if _taker.take is not None:
            _taker.take((self, grid, args, options))
            return None
        key, values = read or self.read(args, options)
        kernel = self._loaded[key][0] if self._serves(key) else self._compile(grid, args, options)
        # let Triton launch while a profiler's hook observes launches, because only Triton calls the hook
        start = None if kernel is None or observed() else launch()
        if kernel is None or start is None:
            with compiling(self.fn):
                args, options = self._fitting(grid, args, options)
                self.fn[grid](*args, **options)
        elif words := packed(kernel, grid, values, {}):
            start(words, current_stream(key[0]))
        if kernel is None:
            return None
        pack: Any = functools.partial(packed, kernel, grid, values)
        pack.general = self._loaded[key][1]
        return pack

    def _compile(self, grid: tuple[int, ...], args: tuple, options: dict) -> Loaded | None:
        """Find or compile a call's kernel and store it; return None if only Triton can launch the kernel."""
        key, form = self.form(args, options)
        if self.knows(args, options):
            kernel = self._loaded[key][0]
        elif compat.launching() is None:
            kernel = None
        else:
            wait(_prepared())
            kernel = self._compiled(form, grid, args, options)
        self.keep(kernel, args, options)
        return kernel

    def _compiled(self, form: Any, grid: tuple[int, ...], args: tuple, options: dict) -> Loaded | None:
        if form is not self.fn:
            try:
                return _load(self._fit(form, grid, args, options), current_device())
            # the general form may fail to compile because the kernel needs specialised integers: use the specialised
            # form, which raises its own error if it fails
            except Exception:
                self._forms.refuse(form)
        with compiling(self.fn):
            return _load(self._fit(self.fn, grid, args, options), current_device())

    def _fit(self, form: Any, grid: tuple[int, ...], args: tuple, options: dict) -> Any:
        """Compile a call's kernel, reduced to fit the current device; store the reduced arguments and options."""
        # do not reduce Gluon kernels: portable kernels replace them
        limit = None if getattr(self.fn, "is_gluon", bool)() else fit.shared_memory()
        made, fitting, fitting_options = fit.compiled(form, grid, args, options, self.loop_tiles, limit)
        changed = {i: new for i, (old, new) in enumerate(zip(args, fitting, strict=True)) if old is not new}
        self._fitted[self._forms.tile_key(current_device(), args, options)] = changed, fitting_options
        return made

    def _fitting(self, grid: tuple[int, ...], args: tuple, options: dict) -> tuple[tuple, dict]:
        """Return a call's arguments and options, reduced to fit the device, for a launch by Triton."""
        if compat.find("triton:JITFunction.warmup") is None:
            return args, options
        key = self._forms.tile_key(current_device(), args, options)
        if key not in self._fitted:
            self._fit(self.fn, grid, args, options)
        changed, fitting_options = self._fitted[key]
        return tuple(changed.get(i, x) for i, x in enumerate(args)), fitting_options
