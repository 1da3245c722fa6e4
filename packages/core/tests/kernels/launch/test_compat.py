"""Test undocumented names of torch and Triton: all are present, and results are right if any is missing."""

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tokenmix_core
from tokenmix_core.kernels.launch import compat, compiled
from tokenmix_core.kernels.launch.compat import NAMES

LAUNCH = ("compat", "flags", "cache.codegen", "cache.capture", "cache.replay", "cache.driver", "launcher")
MODULES = [f"tokenmix_core.kernels.launch.{x}" for x in LAUNCH]
MODULES += ["tokenmix_core.ops.autograd"]


def test_no_name_is_missing():
    """On the installed, supported versions of torch and Triton, a missing name would disable the fast path."""
    assert compat.missing() == {}


def test_nothing_is_missing_of_kernels_that_triton_compiles(tmp_path):
    # compile for Hopper, which needs no GPU, in a process in which Triton does not interpret
    script = tmp_path / "kernel.py"
    script.write_text("""if True:
        import triton
        import triton.language as tl
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from tokenmix_core.kernels.launch import compat as private
        from tokenmix_core.kernels.launch.compiled import described

        @triton.jit
        def double(x, n, ADD: tl.constexpr):
            p_x = x + tl.arange(0, 16)
            tl.store(p_x, 2 * tl.load(p_x) + n + ADD)

        source = ASTSource(double, {"x": "*fp32", "n": "i32", "ADD": "constexpr"}, {(2,): 1})
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 2})
        seen = described(kernel)
        assert private.missing() == {}, private.missing()
        assert seen.name == "double" and len(seen.binary) > 1000
        assert seen.types == ["*fp32", "i32", "constexpr"]
        assert (seen.backend, seen.warps, seen.ctas, seen.more) == ("cuda", 2, 1, False)
        assert private.argument_names(double) == ["x", "n", "ADD"]
        del double.arg_names
        assert private.argument_names(double) == ["x", "n", "ADD"]
        assert private.can_drop(double)
        private.drop(double, None)
        assert list(private.kernels_of(double)) == []
        assert private.missing() == {}, private.missing()
    """)
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, script], check=True, timeout=250, env=environment)


@pytest.mark.parametrize(("asked", "fused"), [(None, True), ("0", False)])
def test_kernels_fuse_multiplications_and_additions_unless_the_user_disables_it(tmp_path, asked, fused):
    """Kernels were measured with fused multiply-adds, which Triton will no longer enable by default."""
    script = tmp_path / "kernel.py"
    script.write_text(f"""if True:
        import torch
        import triton
        import triton.language as tl

        from tokenmix_core.kernels.launch.launcher import cached_launch
        from tokenmix_core.testing.compilation import _pretend

        @cached_launch
        @triton.jit
        def add(x, y):
            p_x = x + tl.arange(0, 16)
            tl.store(p_x, tl.load(p_x) * tl.load(y) + 1.0)

        _pretend((), "sm_90")
        made = add.fn.warmup(torch.zeros(16), torch.zeros(1), grid=(1,))
        assert made.metadata.enable_fp_fusion is {fused}
        assert ("fma" in made.asm["ptx"]) is {fused}
    """)
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION")}
    environment |= {"TRITON_DEFAULT_FP_FUSION": asked} if asked else {}
    command = [sys.executable, "-W", "error:TRITON_DEFAULT_FP_FUSION", str(script)]
    subprocess.run(command, check=True, timeout=250, env=environment)


def test_constants_are_marked_as_torch_marks_them():
    ours, torchs = compat.constant_when_traced(lambda: 1), torch.compiler.assume_constant_result(lambda: 1)
    assert vars(ours) == vars(torchs) != {}


def test_operations_are_imported_without_torch_s_compiler():
    check = "import sys, tokenmix_core.ops, tokenmix_core.nn.registry; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=250)


def test_nothing_else_touches_such_names():
    private_parts = {"_C", "_dynamo", "_inductor", "_ops", "_library", "_python_dispatch", "_functorch", "forward_ad"}
    private_names = {"_cdata", "_schema", "is_view", "overloadpacket", "_current_level", "_should_skip_dynamo"}
    private_names |= {"device_caches", "warmup", "arg_names", "load_binary", "triton_key", "knobs", "max_shared_mem"}
    found = []
    # the repository's sources, also where wheels are tested
    packages, installed = Path(__file__).parents[4], Path(tokenmix_core.__file__).parents[1]
    home = {packages / "core/src" / Path(x.__file__).relative_to(installed) for x in (compat, compiled)}
    files = [x for x in packages.glob("*/src/**/*.py") if x.parent.name != "testing" and x not in home]
    assert len(files) > 100
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            parts = set()
            if isinstance(node, ast.Attribute):
                parts = {node.attr} & (private_parts | private_names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                module = node.module.split(".")
                parts = set(module) & private_parts if module[0] == "torch" else set()
                # Gluon is a documented language
                if module[0] == "triton" and module[1:2] not in ([], ["language"], ["experimental"]):
                    parts = {node.module}
            found += [f"{file.name}:{node.lineno} {x}" for x in parts]
    # the launcher asks for a kernel what `private.launching` has seen
    assert [x for x in found if x.split()[1] != "warmup"] == []


@pytest.fixture
def reloaded(monkeypatch):
    """Return modules of `launch` and `ops.autograd`, imported again without the named object."""

    def load(name):
        # the modules as they were before
        modules = [importlib.import_module(x) for x in MODULES]
        resolve = pkgutil.resolve_name
        # modules that are not imported again share one cached lookup of each name, and must not cache the missing name
        for x in NAMES:
            compat.find(x)

        def resolve_others(x):
            if x == name:
                raise AttributeError(name)
            return resolve(x)

        monkeypatch.setattr(pkgutil, "resolve_name", resolve_others)
        for module in modules:
            package, _, short = module.__name__.rpartition(".")
            monkeypatch.delitem(sys.modules, module.__name__)
            monkeypatch.delattr(sys.modules[package], short)
        return SimpleNamespace(**{x.rpartition(".")[2]: importlib.import_module(x) for x in MODULES})

    return load


@pytest.mark.parametrize("name", [None, *NAMES])
def test_without_a_name_results_are_the_same(name, reloaded, fake_gpu):
    launch = reloaded(name)
    assert set(launch.compat.missing()) == ({name.replace(":", ".")} if name else set())
    empty = launch.compat.empty
    add = fake_gpu(launch.launcher, launch.compat, launch.replay)
    if name == "torch._C._dynamo.guards:_empty_strided_cuda":
        # its substitute, apart from the device
        assert empty is launch.compat._torch_empty
    runs = []

    def run(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        runs.append(a)
        once, twice = a.new_empty(len(a) + 2)[2:], torch.empty_like(a)
        add[(1,)](a, b, once, len(a))
        add[(1,)](once, b, twice, len(a))
        return twice, once.clone()

    op = launch.autograd.cached_op(f"tokenmix_tests::{_word(name)}", run, mutates_args=())
    op.register_fake(lambda a, b: (torch.empty_like(a), torch.empty_like(b)))
    add_twice = launch.autograd.differentiable(
        op, run, lambda ctx, inputs, output: None, lambda ctx, do, *_: (do, 2 * do), outputs=1
    )
    for grad in (True, False):
        for _ in range(3):
            a, b = (torch.randn(6, requires_grad=grad) for _ in "ab")
            with torch.set_grad_enabled(grad):
                (out,) = add_twice(a, b)
            torch.testing.assert_close(out, a + 2 * b)
            if grad:
                db = torch.autograd.grad(out.sum(), b)[0]
                torch.testing.assert_close(db, torch.full((6,), 2.0))
    uncached = {x for x, lost in NAMES.items() if "not cached" in lost and x.startswith("torch")}
    # without this name, observers of launches are unknown
    uncached.add("triton.knobs:runtime")
    assert len(runs) == (6 if name in uncached else 1)


def _word(name):
    return "".join(x if x.isalnum() else "_" for x in name or "all")


@pytest.mark.parametrize("name", [x for x in NAMES if x.startswith("triton")])
def test_without_a_name_triton_launches_every_kernel_once(name, reloaded, monkeypatch):
    kernels = reloaded(name).launcher
    launched = []

    class Kernel:
        arg_names, device_caches = ("x", "n"), {}

        def __init__(self, number):
            self.number = number

        def warmup(self, *args, **options):
            assert name != "triton:JITFunction.warmup"
            # nothing that can be launched otherwise
            return object()

        def __getitem__(self, grid):
            return lambda *args, **options: launched.append((self.number, *args[1:]))

    monkeypatch.setattr(kernels, "_prepared", list)
    monkeypatch.setattr(kernels, "current_device", lambda: 0)
    monkeypatch.setattr(kernels, "_load", lambda kernel, device: kernels.loaded(kernel, device))
    first, second = (kernels._Launcher(Kernel(number)) for number in (1, 2))
    x = torch.zeros(4)
    with pytest.warns(RuntimeWarning, match=name.replace(":", ".")):
        kernels.launch_together([(first, (1,), (x, n), {}) for n in (3, 4)] + [(second, (1,), (x, 5), {})])
    first[(1,)](x, 3)
    assert launched == [(1, 3), (1, 4), (2, 5), (1, 3)]


@pytest.mark.slow
def test_without_any_name_operations_are_imported_and_compute(tmp_path):
    script = tmp_path / "operation.py"
    script.write_text("""if True:
        import pkgutil
        from tokenmix_core.kernels.launch import compat as private
        from tokenmix_core.kernels.launch.compiled import described

        # imported before torch is asked for names: again, without
        import importlib, sys
        resolve, names = pkgutil.resolve_name, set(private.NAMES)

        def resolve_others(name):
            if name in names:
                raise AttributeError(name)
            return resolve(name)

        pkgutil.resolve_name = resolve_others
        private = importlib.reload(private)
        import torch
        from tokenmix_core.ops import chunk_ssd

        assert len(private.missing()) == len(names)
        q, k, v = (torch.randn(1, 20, 1, 16, requires_grad=True) for _ in "qkv")
        g = -torch.rand(1, 20, 1)
        both = [chunk_ssd(q, k, v, g, impl=impl).o for impl in ("triton", "reference")]
        torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)
        grads = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in both]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)
    """)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, script], check=True, timeout=250, env=environment)


def test_missing_names_are_reported_once(reloaded):
    name = "triton:AsyncCompileMode"
    launch = reloaded(name)
    with pytest.warns(RuntimeWarning, match=r"triton.AsyncCompileMode \(kernels are compiled one after the other\)"):
        launch.compat.warn_of_missing()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch.compat.warn_of_missing()


def test_nothing_is_reported_if_nothing_is_missing(reloaded):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reloaded(None).compat.warn_of_missing()
