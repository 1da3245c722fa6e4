"""Test launches by one lookup, and launches that are compiled together."""

from __future__ import annotations

import ctypes
import shutil
import struct
import threading
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from tokenmix_core.kernels.launch import compat, fit, forms, launcher
from tokenmix_core.kernels.launch.cache import driver
from tokenmix_core.kernels.launch.launcher import cached_launch, compiled_together

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@cached_launch
@triton.jit
def _double(x, ADD: tl.constexpr):
    p_x = x + tl.arange(0, 16)
    tl.store(p_x, 2 * tl.load(p_x) + ADD)


def test_launches_keep_their_order_and_wait_for_the_end_of_the_block():
    x = torch.ones(16, device=DEVICE)
    for repetition in (1, 2):
        with compiled_together() as launch:
            launch(_double, (1,), x, ADD=1)
            launch(_double, (1,), x, ADD=0)
            assert (x == (1 if repetition == 1 else 6)).all()
        assert (x == (6 if repetition == 1 else 26)).all()


@pytest.mark.gpu
def test_a_kernel_that_fails_to_compile_beside_others_is_compiled_by_itself(monkeypatch):
    x = torch.ones(16, device=DEVICE)
    kernel, failed = _double.fn, []
    # a kernel has its compiler as soon as its cache has been read
    assert kernel.device_caches[torch.cuda.current_device()] is not None
    compiles = kernel.compile

    def fails_once(*args, **options):
        if not failed:
            failed.append(args)
            raise RuntimeError("not now")
        return compiles(*args, **options)

    monkeypatch.setattr(kernel, "compile", fails_once)
    with compiled_together() as launch:
        launch(_double, (1,), x, ADD=2)
        launch(_double, (1,), x, ADD=3)
    assert failed
    assert (x == 11).all()


@cached_launch
@triton.jit
def _write(out, x, nothing, count, long, small, one, flag, factor, ADD: tl.constexpr, ALSO: tl.constexpr):
    o_i = tl.arange(0, 16)
    b = tl.load(x + o_i, mask=o_i < count, other=0.0) * factor
    b += (long // 1000).to(tl.float32) + small + 2 * one + ADD
    if nothing is not None:
        b += tl.load(nothing)
    if flag:
        b += 100
    tl.store(out + tl.program_id(0) * 16 + o_i, b)


@pytest.mark.gpu
@pytest.mark.parametrize("flag", [True, False])
def test_a_launch_takes_arguments_of_every_kind(flag):
    x = torch.randn(16, device="cuda")
    wanted, got = torch.zeros(2, 32, device="cuda")
    args = (x, None, 5, 1 << 40, -3, 1, flag, 0.37)
    _write.fn[(2,)](wanted, *args, ADD=7, ALSO=torch.float32)
    assert wanted.abs().sum() > 0
    # the first launch compiles, all others are packed
    for _ in range(3):
        got.zero_()
        _write[(2,)](got, *args, ADD=7, ALSO=torch.float32)
        assert torch.equal(got, wanted)


@pytest.mark.gpu
def test_a_form_for_all_lengths_computes_what_others_do():
    x = torch.randn(16, device="cuda")
    out = torch.zeros(2, 16, device="cuda")
    for count in (16, 5, 1, 7, 12):
        for long in (1 << 40, 3, 160):
            args = (x, None, count, long, -3, 1, True, 0.37)
            wanted = torch.zeros_like(out)
            _write.fn[(2,)](wanted, *args, ADD=7, ALSO=torch.float32)
            _write[(2,)](out, *args, ADD=7, ALSO=torch.float32)
            assert torch.equal(out, wanted)


@pytest.mark.gpu
def test_a_new_thread_launches():
    x = torch.ones(16, device="cuda")
    _double[(1,)](x, ADD=0)
    thread = threading.Thread(target=lambda: _double[(1,)](x, ADD=0))
    thread.start()
    thread.join()
    assert (x == 4).all()


@pytest.mark.gpu
def test_a_grid_of_nothing_launches_nothing():
    x = torch.ones(16, device="cuda")
    for _ in range(2):
        _double[(0,)](x, ADD=0)
    assert (x == 1).all()


@pytest.mark.gpu
def test_what_observes_launches_is_told_of_them():
    x, told = torch.ones(16, device="cuda"), []
    _double[(1,)](x, ADD=0)
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(told.append)
    try:
        _double[(1,)](x, ADD=0)
    finally:
        hooks.remove(told.append)
    assert len(told) == 1
    assert (x == 4).all()


class Config(ctypes.Structure):
    """CUDA's: sizes of the grid, of a block and of shared memory, the stream, and how many attributes there are."""

    _fields_ = (
        ("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
        ("number", ctypes.c_uint),
    )  # fmt: skip


@pytest.fixture
def handed_over(monkeypatch):
    """The request to CUDA's driver: sizes, the stream, and parameters as words."""
    if shutil.which("gcc") is None and shutil.which("clang") is None:
        pytest.skip("there is no compiler")
    calls = []

    @ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
    )
    def cuda_launch(config, function, parameters, _):
        words = [ctypes.cast(parameters[i], ctypes.POINTER(ctypes.c_uint64))[0] for i in range(4)]
        calls.append((function, tuple(config[0].sizes), config[0].stream, config[0].number, words))
        return 1 if function == 99 else 0

    monkeypatch.setattr(driver, "_cuda_launch", lambda: ctypes.cast(cuda_launch, ctypes.c_void_p).value)
    texts = SimpleNamespace(cuGetErrorString=lambda *_: 0)
    monkeypatch.setattr(driver, "_cuda", lambda: texts)
    monkeypatch.setattr(driver, "_enter", lambda: None)
    driver.launch.cache_clear()
    yield calls
    driver.launch.cache_clear()


def packed(function=7, grid=(2, 3), factor=0.5, pdl=False):
    kernel = driver.Loaded(function, 128, 100, pdl, ("Q", None, "Q", "i", "f"))
    return driver.packed(kernel, grid, [0, "compiled in", 0, -5, factor], {0: (2, 64), 2: (1, 0)})


def test_launches_are_handed_over_in_turn(handed_over):
    driver.launch()(packed() + packed(grid=(4,), factor=2.0, pdl=True), 9, 1000, 2000)
    half, two = (struct.unpack("I", struct.pack("f", x))[0] for x in (0.5, 2.0))
    assert handed_over == [
        (7, (2, 3, 1, 128, 1, 1, 100), 9, 0, [2064, 1000, (1 << 32) - 5, half]),
        (7, (4, 1, 1, 128, 1, 1, 100), 9, 1, [2064, 1000, (1 << 32) - 5, two]),
    ]


def test_a_launch_that_fails_is_the_last(handed_over):
    with pytest.raises(RuntimeError, match="error 1"):
        driver.launch()(packed() + packed(function=99) + packed(), 9, 1000, 2000)
    assert [function for function, *_ in handed_over] == [7, 99]


def test_nothing_is_packed_for_a_grid_of_nothing(handed_over):
    assert packed(grid=(3, 0)) == b""


def test_a_grid_that_no_gpu_can_launch_is_refused_in_one_sentence():
    for grid in ((1, 65_536), (1, 1, 65_536)):
        with pytest.raises(ValueError, match=r"65,536.* up to 65,535 along each: split heads or channels"):
            packed(grid=grid)


@pytest.mark.parametrize("args", [(b"",), ("text", 0), (b"", *range(300))], ids=["no stream", "no bytes", "too many"])
def test_other_arguments_are_refused(handed_over, args):
    with pytest.raises(TypeError, match="launch"):
        driver.launch()(*args)


class Compiled:
    """A compiled kernel as Triton returns it."""

    def __init__(self, types=("*bf16", "constexpr", "i32"), **metadata):
        usual = dict(target=SimpleNamespace(backend="cuda"), num_ctas=1, num_warps=4, shared=100)
        usual |= dict(global_scratch_size=0, profile_scratch_size=0)
        self.metadata = SimpleNamespace(**{**usual, **metadata})
        self.src = SimpleNamespace(signature=dict(enumerate(types)))
        self.name, self.kernel = "name", b"binary"


@pytest.fixture
def loads(monkeypatch):
    utils = SimpleNamespace(load_binary=lambda *_: (1, 7, 32, 0, 1024))
    active = SimpleNamespace(active=SimpleNamespace(utils=utils))
    names = compat.Launching(active, build=None, include_dirs=None, max_shared=lambda device: 1000)
    monkeypatch.setattr(compat, "launching", lambda: names)


def test_a_compiled_kernel_is_loaded(loads):
    assert driver.loaded(Compiled(), 0) == (7, 128, 100, False, ("Q", None, "i"))
    assert driver.loaded(Compiled(launch_pdl=True), 0).pdl


OTHERS = {
    "scratch": Compiled(global_scratch_size=64),
    "scratch of a profiler": Compiled(profile_scratch_size=64),
    "instrumented": Compiled(instrumentation_mode="gsan"),
    "another device": Compiled(target=SimpleNamespace(backend="hip")),
    "cluster": Compiled(num_ctas=2),
    "cooperative": Compiled(launch_cooperative_grid=True),
    "too much shared memory": Compiled(shared=2000),
    "too many threads": Compiled(num_warps=64),
    "too many arguments": Compiled(("i32",) * 95),
    "descriptor": Compiled(("tensordesc<bf16[64, 64]>",)),
    "tuple": Compiled((("*bf16", "i32"),)),
}


@pytest.mark.parametrize("kernel", OTHERS.values(), ids=OTHERS)
def test_other_kernels_are_left_to_triton(loads, kernel):
    assert driver.loaded(kernel, 0) is None


def test_a_first_launch_is_handed_over_like_later_ones(handed_over, monkeypatch):
    compiled, left = [], []

    class Kernel:
        arg_names = ("x", "flag", "y", "n", "factor")

        def warmup(self, *args, **options):
            compiled.append(args)

        def __getitem__(self, grid):
            return lambda *args, **options: left.append(args)

    monkeypatch.setattr(launcher, "_load", lambda *_: driver.Loaded(7, 128, 100, False, ("Q", None, "Q", "i", "f")))
    monkeypatch.setattr(launcher, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "current_stream", lambda device: 9)
    monkeypatch.setattr(launcher, "_prepared", list)
    kernel = launcher._Launcher(Kernel())
    x, y = torch.zeros(4), torch.zeros(4)
    for n in (5, 5, 6):
        kernel[(2,)](x, True, y, n, factor=0.0)
    kernel[(3,)](y, True, x, 5, factor=0.0)
    assert [(sizes[0], words) for _, sizes, _, _, words in handed_over] == [
        (2, [x.data_ptr(), y.data_ptr(), 5, 0]),
        (2, [x.data_ptr(), y.data_ptr(), 5, 0]),
        (2, [x.data_ptr(), y.data_ptr(), 6, 0]),
        (3, [y.data_ptr(), x.data_ptr(), 5, 0]),
    ]
    assert len(compiled) == 2
    monkeypatch.setattr(launcher, "_load", lambda *_: None)
    for _ in range(2):
        kernel[(2,)](x, True, y, 7, factor=0.0)
    assert len(handed_over) == 4
    assert len(left) == 2


class Numbered:
    """A kernel that records the integers for which it is compiled, and which of them are not specialised."""

    arg_names, __name__ = ("x", "flag", "y", "n", "stride", "tiles", "factor"), "numbered"
    params = tuple(SimpleNamespace(is_constexpr=name == "flag") for name in arg_names)

    def __init__(self, compiled, free=()):
        self.compiled, self.free = compiled, tuple(free)

    def warmup(self, *args, grid, **options):
        self.compiled.append((args[1], *args[3:6], *self.free))


@pytest.fixture
def numbered(handed_over, monkeypatch):
    """Return `launch(n, tiles, flag=True)` of such a kernel, its launcher, its compiled forms, and its launches."""
    form = ("Q", None, "Q", "i", "i", "i", "f")
    monkeypatch.setattr(launcher, "_load", lambda *_: driver.Loaded(7, 128, 100, False, form))
    monkeypatch.setattr(launcher, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "current_stream", lambda device: 9)
    monkeypatch.setattr(launcher, "_prepared", list)
    monkeypatch.setattr(compat, "unspecialised", lambda kernel, names: Numbered(kernel.compiled, names))
    compiled = []
    kernel = launcher._Launcher(Numbered(compiled))
    x, y = torch.zeros(4), torch.zeros(4)

    def launch(n, tiles, *, flag=True, stride=64):
        kernel[(tiles,)](x, flag, y, n, stride, tiles, factor=1 / n)

    return launch, kernel, compiled, handed_over


def test_lengths_share_one_form_of_a_kernel(numbered):
    launch, _, compiled, launched = numbered
    for n in range(320, 800):
        launch(n, -(-n // 8))
    assert [words[2] & 0xFFFFFFFF for *_, words in launched] == [*range(320, 800)]
    # one form for the first integers, and one for all values of the two that vary; the stride stays specialised
    assert compiled == [(True, 320, 64, 40), (True, 321, 64, 41, "n", "tiles")]
    launch(5, 1, flag=False)
    assert compiled[2:] == [(False, 5, 64, 1)]


def test_integers_that_a_kernel_leaves_unspecialised_select_no_form(numbered, monkeypatch):
    _, _, compiled, launched = numbered
    declared = ("n", "tiles")
    params = [SimpleNamespace(is_constexpr=x == "flag", do_not_specialize=x in declared) for x in Numbered.arg_names]
    monkeypatch.setattr(Numbered, "params", params)
    kernel = launcher._Launcher(Numbered(compiled))
    for n in (1, 31, 32, 64, 801):
        kernel[(1,)](torch.zeros(4), True, torch.zeros(4), n, 64, n + 1, factor=0.5)
    assert compiled == [(True, 1, 64, 2)]
    # a form for other strides leaves the declared integers unspecialised, too
    kernel[(1,)](torch.zeros(4), True, torch.zeros(4), 7, 65, 8, factor=0.5)
    assert compiled[1:] == [(True, 7, 65, 8, "stride")]
    assert len(launched) == 6


def test_a_general_form_keeps_what_a_kernel_declares(monkeypatch):
    class Kernel:
        arg_names = ("x", "n", "tiles")
        params = tuple(SimpleNamespace(is_constexpr=False, do_not_specialize=name == "n") for name in arg_names)

        def __init__(self, fn, do_not_specialize=()):
            self.fn, self.free = fn, sorted(do_not_specialize)

    monkeypatch.setattr(compat, "choose_compiler_options", lambda kernel: None)
    assert compat.unspecialised(Kernel(None), ["tiles"]).free == ["n", "tiles"]


def test_other_integers_of_the_same_kind_share_the_first_form(numbered):
    launch, _, compiled, launched = numbered
    for n in (32, 64, 48):
        launch(n, 16)
    assert len(compiled) == 1
    assert len(launched) == 3


def test_launches_made_together_are_looked_up_once_each(numbered, monkeypatch):
    launch, kernel, compiled, launched = numbered
    launch(31, 16)
    looked_up, read = [], forms.Forms.read
    monkeypatch.setattr(forms.Forms, "read", lambda *args: looked_up.append(args) or read(*args))
    calls = [(kernel, (16,), (torch.zeros(4), True, torch.zeros(4), n, 64, 16, 0.5), {}) for n in (33, 35)]
    packs = launcher.launch_together(calls)
    assert len(looked_up) == 2
    assert len(compiled) == 1
    # the packed launches make the same launches again
    driver.launch()(b"".join(pack({}) for pack in packs), 9)
    assert launched[1:3] == launched[3:]


def test_integers_that_vary_later_are_not_specialised_from_then_on(numbered):
    launch, _, compiled, _ = numbered
    for n in (32, 33, 47):
        launch(n, 16)
    for tiles in (16, 3, 5, 1, 32):
        launch(51, tiles)
        launch(64, tiles)
    assert compiled == [(True, 32, 64, 16), (True, 33, 64, 16, "n"), (True, 51, 64, 3, "n", "tiles")]


def test_strides_that_stay_multiples_of_16_stay_known(numbered):
    launch, _, compiled, _ = numbered
    for n in (32, 33, 34):
        launch(n, 16, stride=64 * n)
    assert compiled == [(True, 32, 32 * 64, 16), (True, 33, 33 * 64, 16, "n")]


def test_a_form_for_lengths_without_a_common_divisor_serves_all_lengths(numbered):
    launch, kernel, compiled, launched = numbered
    for n in (31, 32, 1, 48, 33):
        launch(n, 16)
    assert compiled == [(True, 31, 64, 16)]
    assert [words[2] & 0xFFFFFFFF for *_, words in launched] == [31, 32, 1, 48, 33]
    args = [(torch.zeros(4), True, torch.zeros(4), n, 64, 16, 0.5) for n in (31, 32)]
    # it is the form of the lengths that it was compiled for, and a general one for others
    assert [kernel.launch((1,), x, {}).general for x in args] == [False, True]
    with forms.specialised():
        launch(33, 16)
        launch(32, 16)
    assert compiled[1:] == [(True, 32, 64, 16)]
    # integers of 64 bits have another type
    assert not kernel.knows((*args[0][:3], 1 << 40, *args[0][4:]), {})


def test_a_kernel_that_needs_its_integers_is_compiled_for_each_combination(numbered, monkeypatch):
    launch, _, compiled, launched = numbered
    warmup = Numbered.warmup

    def refuses(self, *args, grid, **options):
        if self.free:
            raise RuntimeError("PassManager::run failed")
        warmup(self, *args, grid=grid, **options)

    monkeypatch.setattr(Numbered, "warmup", refuses)
    for n in (32, 33, 34, 48):
        launch(n, 16)
    assert compiled == [(True, 32, 64, 16), (True, 33, 64, 16)]
    assert len(launched) == 4


def test_a_call_that_is_replayed_often_gets_a_form_of_its_own(numbered):
    launch, kernel, compiled, _ = numbered
    launch(32, 16)
    launch(33, 16)
    args = torch.zeros(4), True, torch.zeros(4), 33, 64, 16, 0.5
    assert kernel.launch((1,), args, {}).general
    with forms.specialised():
        assert not kernel.knows(args, {})
        launch(33, 16)
    assert compiled[2:] == [(True, 33, 64, 16)]
    assert not kernel.launch((1,), args, {}).general
    launch(33, 16)
    launch(35, 16)
    assert len(compiled) == 3


def test_forms_differ_by_the_width_of_integers():
    assert len({forms.kind(x) for x in (1, 5, 16, 5 + (1 << 31), 16 + (1 << 31), 5 + (1 << 63))}) == 6
    assert forms.kind(True) is bool
    assert forms.kind(0.5) is forms.kind(1.0)
    assert forms.kind(torch.zeros(5)) != forms.kind(torch.zeros(5)[1:])


def test_forms_of_a_kernel_are_bounded(numbered, monkeypatch):
    monkeypatch.setattr(launcher, "_MAX_FORMS", 8)
    monkeypatch.setattr(forms, "_MAX_SIGNATURES", 8)
    launch, kernel, _, _ = numbered
    for flag in range(100):
        launch(32, 16, flag=flag)
        launch(33, 16, flag=flag)
    assert len(kernel._loaded) <= 8
    assert len(kernel._forms._first) <= 8


class Counted:
    """A kernel that counts its compilations."""

    arg_names, __name__ = ("x", "flag", "y", "n", "factor"), "counted"

    def __init__(self):
        self.compiled = []

    def warmup(self, *args, grid, **options):
        self.compiled.append((args, options))


NAMED = {
    "in order": lambda x, y: ((x, True, y, 5, 0.0), {}),
    "by name": lambda x, y: ((), dict(x=x, flag=True, y=y, n=5, factor=0.0)),
    "in another order": lambda x, y: ((), dict(factor=0.0, y=y, n=5, flag=True, x=x)),
    "in part": lambda x, y: ((x,), dict(n=5, factor=0.0, flag=True, y=y)),
    "all but one": lambda x, y: ((x, True, y, 5), dict(factor=0.0)),
}


def test_arguments_by_name_make_the_launch_that_those_in_order_make(handed_over, monkeypatch):
    monkeypatch.setattr(launcher, "_load", lambda *_: driver.Loaded(7, 128, 100, False, ("Q", None, "Q", "i", "f")))
    monkeypatch.setattr(launcher, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "current_stream", lambda device: 9)
    monkeypatch.setattr(launcher, "_prepared", list)
    kernel, taken = launcher._Launcher(Counted()), []
    x, y = torch.zeros(4), torch.zeros(4)
    for give in NAMED.values():
        args, options = give(x, y)
        for more in ({"num_warps": 4}, {"num_stages": 4}):
            kernel[(2,)](*args, **options, **more)
        with launcher.taken(taken.append):
            kernel[(2,)](*args, num_warps=4, **options)
    args = x, True, y, 5, 0.0
    # each option of a launch compiles a kernel of its own
    assert kernel.fn.compiled == [(args, {"num_warps": 4}), (args, {"num_stages": 4})]
    assert len({tuple(words) for *_, words in handed_over}) == 1
    assert len(handed_over) == 2 * len(NAMED)
    # a capture contains indices of arguments
    assert all(found == (kernel, (2,), args, {"num_warps": 4}) for found in taken)
    with compiled_together() as launch:
        for give in NAMED.values():
            args, options = give(x, y)
            launch(kernel, (2,), *args, **options, num_warps=4)
    assert len(kernel.fn.compiled) == 2


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((1, 2), dict(y=3, n=4), r"counted misses \['factor'\]; its parameters are x, flag, y, n, factor"),
        ((1, 2, 3, 4), dict(n=4, factor=5), r"counted is given \['n'\] twice"),
        ((1, 2, 3, 4, 5, 6), {}, "counted is given too much"),
    ],
    ids=["missing", "twice", "too many"],
)
def test_a_launch_that_fits_no_kernel_is_refused(args, options, message):
    with pytest.raises(TypeError, match=message):
        launcher._Launcher(Counted())[(1,)](*args, **options)


class Sized:
    """A kernel whose shared memory is a stage's, for each stage, of BM resident and BN loaded rows."""

    arg_names, __name__ = ("x", "BM", "BN"), "sized"
    params = tuple(SimpleNamespace(is_constexpr=name != "x") for name in arg_names)

    def __init__(self):
        self.compiled = []

    def warmup(self, x, BM, BN, *, grid, num_stages=3):
        self.compiled.append((BM, BN, num_stages))
        return SimpleNamespace(metadata=SimpleNamespace(shared=100 * (BM + num_stages * BN)))


@pytest.mark.parametrize(
    ("limit", "compiled"),
    [
        (None, [(64, 64, 3)]),
        (25_600, [(64, 64, 3)]),
        (25_599, [(64, 64, 3), (64, 64, 2)]),
        (12_800, [(64, 64, 3), (64, 64, 2), (64, 64, 1)]),
        (8_000, [(64, 64, 3), (64, 64, 2), (64, 64, 1), (64, 32, 1), (64, 16, 1)]),
    ],
)
def test_a_kernel_takes_the_next_smaller_tile_until_it_fits(limit, compiled):
    kernel = Sized()
    made, args, options = fit.compiled(kernel, (1,), (None, 64, 64), {"num_stages": 3}, ("BN",), limit)
    assert kernel.compiled == compiled
    assert made.metadata.shared <= (limit or 25_600)
    assert (*args[1:], options["num_stages"]) == compiled[-1]


def test_a_kernel_that_fits_no_tile_names_the_workaround():
    with pytest.raises(ValueError, match=r"sized needs 8,000 bytes .* has 7,999; .*impl='reference'"):
        fit.compiled(Sized(), (1,), (None, 64, 64), {}, ("BN",), 7_999)


def test_triton_launches_the_tile_that_fits(monkeypatch):
    launched = []

    class Kernel(Sized):
        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((*args, options))

    monkeypatch.setattr(launcher, "current_device", lambda: 0)
    monkeypatch.setattr(fit, "shared_memory", lambda: 10_000)
    monkeypatch.setattr(launcher, "_load", lambda *_: None)
    monkeypatch.setattr(launcher, "_prepared", list)
    kernel, x = launcher._Launcher(Kernel(), ("BN",)), torch.zeros(4)
    for _ in range(2):
        kernel[(2,)](x, 64, 64, num_stages=2)
    assert launched == [(x, 64, 32, {"num_stages": 1})] * 2
    assert kernel.fn.compiled == [(64, 64, 2), (64, 64, 1), (64, 32, 1)]
