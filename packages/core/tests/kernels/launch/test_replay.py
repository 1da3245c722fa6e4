"""Test that replayed calls equal calls that are run, on a CPU that is treated as a GPU (conftest.py)."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from tokenmix_core.kernels.launch import compat, forms
from tokenmix_core.kernels.launch.cache import admission, capture, codegen, replay
from tokenmix_core.kernels.launch.cache.replay import Checked, Replayed, invalidate
from tokenmix_core.kernels.launch.errors import NotCompiled
from tokenmix_core.ops import gated_delta_rule_step, short_conv_step, ssd_step


class Counted:
    """A function whose runs are counted."""

    def __init__(self, function):
        self.function, self.runs = function, 0

    def __call__(self, *inputs):
        self.runs += 1
        return self.function(*inputs)


def counted(function):
    function = Counted(function)
    return function, Replayed(function)


def three_sums(add):
    """Return a + b + b, and the second half of it next to its first; the buffer between the sums is not returned."""

    def run(a, b, factor):
        a = a.contiguous()
        between, whole = torch.empty_like(a), a.new_empty(2, len(a))
        add[(1,)](a, b, between, len(a))
        add[(1,)](between, b, whole[1], len(a))
        add[(1,)](whole[1], whole[1], whole[0], len(a))
        return whole[1], None, whole.view(-1), a.new_empty(0), a

    return counted(run)


def test_a_replay_gives_what_a_run_gives(add):
    function, replayed = three_sums(add)
    for i in range(4):
        a, b = torch.randn(6), torch.randn(6)
        once, nothing, both, empty, same = replayed(a, b, 2.0)
        torch.testing.assert_close(once, a + b + b, rtol=0, atol=0)
        torch.testing.assert_close(both, torch.cat([2 * once, once]), rtol=0, atol=0)
        assert nothing is None
        assert empty.shape == (0,)
        assert same is a
        assert once.data_ptr() == both[6:].data_ptr()
        assert add.launches == 3 * (i + 1)
    assert function.runs == 1


def test_results_of_calls_share_no_memory(add):
    _, replayed = three_sums(add)
    a, b = torch.randn(6), torch.randn(6)
    results = [replayed(a, b, 1.0)[2] for _ in range(3)]
    assert len({x.data_ptr() for x in results}) == 3


@pytest.mark.parametrize(
    "other",
    [
        lambda a, b: (torch.randn(7), torch.randn(7), 1.0),
        lambda a, b: (a, b, 3.0),
        lambda a, b: (torch.randn(7)[1:], b, 1.0),
        lambda a, b: (a, torch.randn(12)[::2], 1.0),
        lambda a, b: (a, b.double(), 1.0),
    ],
    ids=["size", "number", "alignment", "stride", "dtype"],
)
def test_another_kind_of_call_is_run(add, other):
    function, replayed = three_sums(add)
    a, b = torch.randn(6), torch.randn(6)
    replayed(a, b, 1.0)
    replayed(*other(a, b))
    assert function.runs == 2


def test_a_tensor_given_twice_is_run(add):
    function, replayed = three_sums(add)
    a = torch.randn(6)
    for _ in range(3):
        torch.testing.assert_close(replayed(a, a, 1.0)[0], 3 * a)
    assert function.runs == 3
    replayed(a, torch.randn(6), 1.0)
    b = torch.randn(6)
    torch.testing.assert_close(replayed(a, b, 1.0)[0], a + 2 * b)
    # the capture of two tensors is also right if both are one tensor
    torch.testing.assert_close(replayed(a, a[:], 1.0)[0], 3 * a)
    assert function.runs == 4


def test_several_empty_tensors_are_replayed(add):
    def run(a, b, nothing, none):
        out = torch.empty_like(a)
        add[(1,)](a, b, out, len(a))
        return out, none, nothing

    function, replayed = counted(run)
    for _ in range(3):
        a, b, nothing, none = torch.randn(6), torch.randn(6), torch.empty(0), torch.empty(0)
        out, second, first = replayed(a, b, nothing, none)
        torch.testing.assert_close(out, a + b)
        assert first is nothing
        assert second is none
    assert function.runs == 1


@pytest.mark.parametrize("mode", [nullcontext, torch._C._AutoDispatchBelowAutograd], ids=["eager", "compiled"])
def test_operations_between_launches_are_replayed_in_order(add, mode):
    def run(a, b):
        a = a.contiguous()
        out = torch.empty_like(a)
        add[(1,)](a, b, out, len(a))
        doubled = out * 2
        add[(1,)](doubled, b, out, len(a))
        out[:3].mul_(3)
        return out, out.view(2, 3).sum(0, dtype=torch.float64), torch.zeros(2)

    function, replayed = counted(run)
    for _ in range(4):
        a, b = torch.randn(6, 2)[:, 0], torch.randn(6)
        out = 2 * (a + b) + b
        out[:3] *= 3
        # code compiled by torch calls operators below autograd
        with mode():
            got = replayed(a, b)
        torch.testing.assert_close(got[0], out)
        torch.testing.assert_close(got[1], out[:3].double() + out[3:])
        assert got[2].tolist() == [0.0, 0.0]
        got[2].fill_(7.0)
    assert function.runs == 1


@pytest.mark.parametrize(
    "other",
    [lambda x: x.max(0)[0], lambda x: x.nonzero(), lambda x: torch.cat([x, x]), lambda x: torch.tensor(x.sum().item())],
    ids=["two results", "size that depends on values", "list of tensors", "number"],
)
def test_a_call_with_other_work_is_run(add, other):
    def run(a, b):
        out = torch.empty_like(a)
        add[(1,)](a, b, out, len(a))
        return other(out)

    function, replayed = counted(run)
    for _ in range(3):
        a, b = torch.randn(6), torch.randn(6)
        torch.testing.assert_close(replayed(a, b), other(a + b))
    assert function.runs == 3


def test_a_call_that_launches_unseen_kernels_is_run(add):
    def run(a, b):
        out, seen = torch.empty_like(a), torch.zeros_like(a)
        add[(1,)](a, b, out, len(a))
        capture.launches_unseen()
        # another library reads earlier results without a torch operation
        seen.numpy()[:] = out.numpy()
        return seen

    function, replayed = counted(run)
    for _ in range(3):
        a, b = torch.randn(6), torch.randn(6)
        torch.testing.assert_close(replayed(a, b), a + b)
    assert function.runs == 3
    capture.launches_unseen()


def test_memory_of_other_owners_is_not_replayed(add):
    kept = torch.randn(6)

    def run(a):
        out = torch.empty_like(a)
        add[(1,)](a, kept, out, len(a))
        return out

    function, replayed = counted(run)
    for _ in range(3):
        a = torch.randn(6)
        torch.testing.assert_close(replayed(a), a + kept)
    assert function.runs == 3


def test_a_changed_input_is_changed_again(add):
    def run(state, x):
        add[(1,)](state, x, state, len(x))
        return state

    function, replayed = counted(run)
    state, total = torch.zeros(6), torch.zeros(6)
    for _ in range(3):
        x = torch.randn(6)
        total += x
        assert replayed(state, x) is state
        torch.testing.assert_close(state, total)
    assert function.runs == 1


def test_more_kinds_than_are_tried_take_turns(add):
    function, replayed = three_sums(add)
    sizes = range(8, 8 + 2 * replay._COMPARED)
    for _ in range(4):
        for n in sizes:
            a, b = torch.randn(n), torch.randn(n)
            torch.testing.assert_close(replayed(a, b, 1.0)[0], a + b + b)
    # the first of these sizes is captured at once, since its kernels may be new; the others at their second call
    assert function.runs == 2 * len(sizes) - 1


@pytest.fixture
def captures(monkeypatch):
    """Return the list of the first input's sizes in captured calls."""
    made, init = [], capture.Capture.__init__

    def noted(self, inputs):
        made.append(len(inputs[0]))
        init(self, inputs)

    monkeypatch.setattr(capture.Capture, "__init__", noted)
    return made


def call(replayed, n):
    a, b = torch.randn(n), torch.randn(n)
    torch.testing.assert_close(replayed(a, b, 1.0)[0], a + b + b)


def test_a_call_is_captured_where_its_signature_has_occurred_before(add, captures):
    function, replayed = three_sums(add)
    # the first call of a magnitude is captured, so that its kernels are compiled in parallel
    call(replayed, 1024)
    assert captures == [1024]
    for _ in range(4):
        call(replayed, 1100)
    assert captures == [1024, 1100]
    assert function.runs == 3
    call(replayed, 2048)
    assert captures == [1024, 1100, 2048]


def test_lengths_that_never_return_are_not_captured_and_leave_little_behind(add, captures):
    _, replayed = three_sums(add)
    for n in range(1024, 2048):
        call(replayed, n)
    assert captures == [1024]
    assert len(replayed._calls) == 1
    assert len(replayed._admission._seen) <= admission.MAX_SEEN
    assert len(replayed._admission._magnitudes) == 1


def test_a_length_that_repeats_after_others_is_captured_again(add, captures):
    function, replayed = three_sums(add)
    for n in range(1024, 1600):
        call(replayed, n)
    captures.clear()
    for _ in range(5):
        call(replayed, 1700)
    assert captures == [1700]
    runs = function.runs
    call(replayed, 1700)
    assert function.runs == runs


def test_captures_that_are_not_replayed_become_rare_and_repeats_bring_them_back(add, captures):
    _, replayed = three_sums(add)
    # each length twice, as in a model of two layers: the length captured the second time never returns
    for n in range(1024, 1324):
        call(replayed, n)
        call(replayed, n)
    assert len(captures) <= 2 * admission._PATIENCE
    captures.clear()
    for _ in range(20):
        call(replayed, 1700)
    assert captures == [1700]
    # many replays: the next lengths are captured at once, and as they do not return, later ones wait again
    for n in range(1701, 2000):
        call(replayed, n)
    assert captures == [*range(1700, 1701 + admission._RECENT)]


def test_calls_without_an_optional_input_that_are_rare_are_captured_rarely(add, captures):
    def run(a, b, c):
        out = torch.empty_like(a)
        add[(1,)](a, b if c is None else c, out, len(a))
        return out

    _, replayed = counted(run)
    # as in a model of eight layers, whose first norm alone adds no branch
    for n in range(1024, 1044):
        a, b, c = torch.randn(3, n)
        torch.testing.assert_close(replayed(a, b, None), a + b)
        for _ in range(7):
            torch.testing.assert_close(replayed(a, b, c), a + c)
    # each call with c; and the first call without it, since its kernels may be new
    assert len(captures) == 21


@pytest.mark.parametrize("layers", [4, 24])
def test_captures_of_deep_models_are_made_at_once(add, captures, layers):
    function, replayed = three_sums(add)
    for n in range(1024, 1044):
        for _ in range(layers):
            call(replayed, n)
    # but for the second length, when nothing was known yet
    assert function.runs <= 21
    assert len(captures) == 20


def test_captures_are_bounded_and_the_least_recently_used_is_dropped(add, captures):
    function, replayed = three_sums(add)
    for n in range(1024, 1024 + 3 * replay.MAX_CALLS):
        for _ in range(3):
            call(replayed, n)
            call(replayed, 1024)
    assert len(replayed._calls) == replay.MAX_CALLS
    runs = function.runs
    call(replayed, 1024)
    assert function.runs == runs
    call(replayed, 1025)
    assert function.runs == runs + 1


def test_calls_that_cannot_be_captured_are_hardly_tried(add, captures):
    def run(a, b, factor):
        out = torch.empty_like(a)
        add[(1,)](a, b, out, len(a))
        return out.max(0)[0]

    _, replayed = counted(run)
    for n in range(1024, 1524):
        for _ in range(2):
            a, b = torch.randn(n), torch.randn(n)
            torch.testing.assert_close(replayed(a, b, 1.0), (a + b).max())
    assert len(captures) <= 2 * admission._PATIENCE


def test_a_first_occurrence_enters_no_dispatch_mode(add, monkeypatch):
    _, replayed = three_sums(add)
    call(replayed, 1024)

    def refuse(*args):
        raise AssertionError("operations are watched")

    monkeypatch.setattr(capture.Capture, "__torch_dispatch__", refuse)
    monkeypatch.setattr(capture, "compiled", refuse)
    monkeypatch.setattr(replay, "matching", refuse)
    call(replayed, 1100)


def test_views_of_contiguous_inputs_are_captured_without_their_decomposition(add, monkeypatch):
    def run(a, b):
        out = torch.empty_like(b)
        add[(1,)](a.contiguous().flatten(), b.unflatten(1, (1, 3)).reshape(-1), out, b.numel())
        return out

    def refuse(*args):
        raise AssertionError("an operation was decomposed")

    function, replayed = counted(run)
    # in inference mode these operations reach a capture as a whole
    with torch.inference_mode():
        # allocations and views are known to be elementary from here on
        replayed(torch.randn(1, 3), torch.randn(1, 3))
        monkeypatch.setattr(compat, "composed", refuse)
        for _ in range(3):
            a, b = torch.randn(2, 3), torch.randn(2, 3)
            torch.testing.assert_close(replayed(a, b), a + b)
    assert function.runs == 2


def test_the_code_that_compares_signatures_is_shared_by_all_sizes(add):
    _, replayed = three_sums(add)
    for n in (8, 8, 8):
        call(replayed, n)
    made = codegen._guard_code.cache_info().misses
    for n in (16, 32, 64):
        call(replayed, n)
        call(replayed, n)
    assert codegen._guard_code.cache_info().misses == made


def test_calls_alike_but_for_the_mode_are_one_kind(add):
    function, replayed = three_sums(add)
    for requires_grad in (False, True, False):
        for mode in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
            with mode():
                a, b = torch.randn(6, requires_grad=requires_grad), torch.randn(6)
                for _ in range(2):
                    torch.testing.assert_close(replayed(a.detach(), b, 1.0)[0], a.detach() + b + b)
    assert function.runs == 1


def test_calls_with_and_without_gradients_take_turns(add):
    function, replayed = three_sums(add)
    inputs = [(torch.randn(6, requires_grad=x), torch.randn(6), 1.0) for x in (False, True)]
    for _ in range(2):
        for x in inputs:
            replayed(*x)
    assert function.runs == 1
    assert all(any(match(*x) for match in replayed.recent) for x in inputs)


def test_without_torchs_guards_calls_are_replayed_all_the_same(add, monkeypatch):
    monkeypatch.setattr(compat, "Guards", None)
    function, replayed = three_sums(add)
    for _ in range(3):
        a, b = torch.randn(6), torch.randn(6)
        torch.testing.assert_close(replayed(a, b, 1.0)[0], a + b + b)
    assert function.runs == 1


def test_a_call_that_is_replayed_often_is_captured_once_more_by_kernels_of_its_own(add, captures, monkeypatch):
    monkeypatch.setattr(replay, "_SPECIALISED", 6)
    asked = []

    def packing(self, grid, args, options):
        pack = lambda pointers: packs(self, grid, args, options)(pointers)  # noqa: E731
        pack.general = not forms.asked()
        asked.append(forms.asked())
        return pack

    packs = type(add).packing
    monkeypatch.setattr(type(add), "packing", packing)
    function, replayed = three_sums(add)
    for _ in range(20):
        call(replayed, 1024)
    assert captures == [1024, 1024]
    assert function.runs == 2
    assert asked == [False] * 3 + [True] * 3
    assert replayed._calls
    assert len(replayed.recent) == 1


def test_a_signature_does_not_match_fewer_or_more_inputs():
    x, y = torch.zeros(3), torch.ones(3)
    alike = codegen.alike((x, 1, y), [0])
    assert alike(y, 1, x)
    for others in ((x, 1), (x, 1, None), (x, 1, y, y), (x, 1, y, None), ()):
        assert not alike(*others)


@pytest.mark.parametrize("limit", [1 << 20, 0], ids=["one buffer", "buffers"])
def test_buffers_between_launches_do_not_meet(add, monkeypatch, limit):
    monkeypatch.setattr(codegen, "_MAX_SHARED_BYTES", limit)
    n = 700

    def run(a, b):
        twice, thrice, part = torch.empty_like(a), a.new_empty(3, n), torch.empty_like(a)
        unread, out = torch.empty_like(a), torch.empty_like(a)
        add[(1,)](a, a, twice, n)
        add[(1,)](twice, a, thrice[1], n)
        add[(1,)](thrice[1], b, thrice[2], n)
        add[(1,)](thrice[1], thrice[2], part, n)
        add[(1,)](part, twice, unread, n)
        add[(1,)](part, twice, out, n)
        return out

    function, replayed = counted(run)
    for _ in range(3):
        a, b = torch.randn(n), torch.randn(n)
        torch.testing.assert_close(replayed(a, b), 8 * a + b)
    assert function.runs == 1


def test_operations_on_views_of_inputs_are_replayed(add):
    def run(a, b):
        out = torch.empty_like(a)
        add[(1,)](a, b, out, len(a))
        return out, a.view(2, 3) * 2, b.unsqueeze(0)

    function, replayed = counted(run)
    for offset in (0, 8, 16):
        whole, b = torch.randn(32), torch.randn(6)
        a = whole[offset : offset + 6]
        out, doubled, same = replayed(a, b)
        torch.testing.assert_close(out, a + b, rtol=0, atol=0)
        torch.testing.assert_close(doubled, 2 * a.view(2, 3), rtol=0, atol=0)
        assert same.data_ptr() == b.data_ptr()
        assert same.shape == (1, 6)
    assert function.runs == 1


def test_a_call_that_asks_for_a_common_dtype_is_replayed(add):
    def run(a, b):
        out = torch.empty_like(a, dtype=torch.promote_types(a.dtype, b.dtype))
        add[(1,)](a, b, out, len(a))
        return out

    function, replayed = counted(run)
    for _ in range(3):
        a, b = torch.randn(6), torch.randn(6)
        torch.testing.assert_close(replayed(a, b), a + b, rtol=0, atol=0)
    assert function.runs == 1


def test_a_part_of_an_input_is_found_where_no_other_shares_its_memory(add):
    def run(whole, b):
        out = torch.empty_like(b)
        add[(1,)](whole[len(b) :], b, out, len(b))
        return out

    function, replayed = counted(run)
    for _ in range(3):
        whole, b = torch.randn(8), torch.randn(4)
        torch.testing.assert_close(replayed(whole, b), whole[4:] + b, rtol=0, atol=0)
    assert function.runs == 1
    # else it may be a part of either
    for _ in range(2):
        whole, b = torch.randn(16).split((12, 4))
        torch.testing.assert_close(replayed(whole, b), whole[4:8] + b, rtol=0, atol=0)
    assert function.runs == 3


def checked(check, monkeypatch, on_gpu=True):
    monkeypatch.setattr(replay, "on_gpu", lambda x: on_gpu)
    check = Counted(check)
    return check, Checked(check)


def test_what_was_checked_is_not_checked_again(monkeypatch):
    check, again = checked(lambda x, y, n: (x.shape[0], n), monkeypatch)
    for _ in range(3):
        assert again(torch.randn(5), None, 2) == (5, 2)
    assert check.runs == 1
    invalidate()
    again(torch.randn(5), None, 2)
    assert check.runs == 2


def test_what_is_checked_of_lengths_that_never_return_is_not_kept(monkeypatch):
    check, again = checked(lambda x: x.shape[0], monkeypatch)
    made = []
    monkeypatch.setattr(replay, "alike", lambda *given: made.append(given) or codegen.alike(*given))
    for n in range(1024, 2048):
        assert again(torch.randn(n)) == n
    assert len(made) == 1
    assert len(again._admission._seen) <= admission.MAX_SEEN
    runs = check.runs
    for _ in range(3):
        assert again(torch.randn(1100)) == 1100
    assert len(made) == 2
    assert check.runs == runs + 2


@pytest.mark.parametrize(
    "other",
    [
        lambda: (torch.randn(6), None, 1),
        lambda: (torch.randn(5).double(), None, 1),
        lambda: (torch.randn(10)[::2], None, 1),
        lambda: (torch.randn(5), torch.randn(5), 1),
        lambda: (torch.randn(5), None, True),
        lambda: (torch.randn(5), None, 1.0),
        lambda: (torch.randn(5), 1, None),
        lambda: (None, None, 1),
        lambda: (torch.randn(5), None, 1, torch.randn(3)),
        lambda: (torch.randn(5), None),
    ],
    ids=["size", "dtype", "stride", "another tensor", "bool", "float", "address", "no tensor", "more", "fewer"],
)
def test_what_looks_different_is_checked(monkeypatch, other):
    check, again = checked(lambda x, y, n=1, *more: None, monkeypatch)
    again(torch.randn(5), None, 1)
    again(*other())
    assert check.runs == 2


def test_what_was_refused_is_refused_again(monkeypatch):
    def refuse(x):
        raise ValueError("no")

    check, again = checked(refuse, monkeypatch)
    for runs in (1, 2):
        with pytest.raises(ValueError, match="no"):
            again(torch.randn(5))
        assert check.runs == runs


def test_values_that_may_be_read_are_checked_every_time(monkeypatch):
    # boundaries on a CPU, and a tensor with a single value on any device, may be read
    check, again = checked(lambda x, n: None, monkeypatch, on_gpu=False)
    for runs in (1, 2):
        again(torch.randn(5), 1)
        assert check.runs == runs
    check, again = checked(lambda x, n: float(n), monkeypatch)
    assert [again(torch.randn(5), torch.tensor(n)) for n in (1.0, 2.0)] == [1.0, 2.0]


def test_after_forget_calls_are_run(add):
    function, replayed = three_sums(add)
    inputs = torch.randn(6), torch.randn(6), 1.0
    replayed(*inputs)
    invalidate()
    replayed(*inputs)
    assert function.runs == 2


def test_an_error_leaves_nothing_behind(add):
    def run(a, b):
        add[(1,)](a, b, torch.empty_like(a), len(a))
        raise ValueError("no")

    _, replayed = counted(run)
    a, b, out = torch.ones(6), torch.ones(6), torch.zeros(6)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            replayed(a, b)
    assert add.launches == 0
    add[(1,)](a, b, out, 6)
    assert out.tolist() == [2.0] * 6


def test_autograd_is_told_of_what_a_step_writes(device):
    x, rates, taps = (torch.ones(shape, device=device) for shape in ((1, 1, 64), (1, 1), (64, 4)))
    state, last = torch.ones(1, 1, 64, 64, device=device), torch.ones(1, 64, 3, device=device)
    steps = [
        (state, lambda: gated_delta_rule_step(x, x, x, -rates, rates, state, impl="triton")),
        (state, lambda: ssd_step(x, x, x, -rates, state, impl="triton")),
        (last, lambda: short_conv_step(x[0], taps, None, last, impl="triton")),
    ]
    for written, step in steps:
        y = (torch.ones_like(written, requires_grad=True) * written).sum()
        step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_capturing_a_call_does_not_import_torchs_compiler():
    script = """if True:
        import sys
        import torch
        from tokenmix_core.kernels.launch import launcher
        from tokenmix_core.kernels.launch.cache import replay

        replay.on_gpu = lambda x: True
        launcher.current_device, launcher.current_stream, launcher.launch = lambda: -1, lambda device: 0, lambda: None
        replayed = replay.Replayed(lambda x: torch.empty_like(x).fill_(1))
        assert replayed(torch.zeros(3)).tolist() == [1, 1, 1]
        assert list(replayed._calls.values()) != [None]
        assert "torch._dynamo" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=250)


def test_a_capture_whose_kernel_does_not_compile_is_not_kept(add, monkeypatch):
    refusals = [NotCompiled("no", "somewhere")]
    launch = type(add)._run

    def refuses_once(self, *args):
        if refusals:
            raise refusals.pop()
        launch(self, *args)

    _, run = three_sums(add)
    a, b = torch.randn(6), torch.randn(6)
    with monkeypatch.context() as patch:
        patch.setattr(type(add), "_run", refuses_once)
        with pytest.raises(NotCompiled):
            run(a, b, 1.0)
    assert not run.recent
    for _ in range(2):
        torch.testing.assert_close(run(a, b, 1.0)[0], a + b + b)
    assert run.recent
