"""Tests that an operation refuses malformed calls before any kernel launch, with a message that names the argument."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenmix_core.testing.launch_spies import no_launches


class RefusalTests:
    """Part of `OpContract`, which documents the attributes."""

    def test_malformed_calls_are_refused_before_a_launch(self, form, bad, device):
        here: Any = self
        tensors, options = here.make(torch.float32, **here.valid)
        change, words = here.malformed[bad]
        self._assert_refused(here.forms[form], tensors | options, change, words, device)

    def _assert_refused(self, function: Callable, arguments: dict[str, Any], change: Any, words: str, device) -> None:
        # the unchanged call must be valid, and raise nothing
        function(**arguments)
        changed: Any = change(arguments) if callable(change) else {**arguments, **change}
        if changed.get("impl") == "triton":
            # kernels require tensors on the device
            changed = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in changed.items()}
        with no_launches(), pytest.raises(ValueError, match=words) as error:
            function(**changed)
        assert "\n" not in str(error.value)
        assert ": " in str(error.value)

    def test_bfloat16_in_the_interpreter_is_refused_by_name(self, form, device):
        here: Any = self
        if device != "cpu" or "half" not in here.dtypes:
            pytest.skip("the operation has no kernels in bfloat16, or they run on a GPU")
        tensors, options = here.make(torch.bfloat16, **here.valid)
        assert torch.bfloat16 in {x.dtype for x in tensors.values()}
        with no_launches(), pytest.raises(ValueError, match="takes float16 and float32 in Triton's interpreter"):
            here.forms[form](**tensors, **options, impl="triton")

    def test_a_meta_tensor_among_real_ones_is_refused_by_name(self, form, impl, device):
        here: Any = self
        tensors, options = here.make(torch.float32, device if impl == "triton" else "cpu", **here.valid)
        self._assert_meta_refused(here.forms[form], tensors | options | {"impl": impl}, lambda x: here.named(form, x))

    def test_a_meta_tensor_among_those_of_a_step_is_refused_by_name(self, impl, device):
        here: Any = self
        if here.step is None:
            pytest.skip(here.absent["step"])
        step, sizes = here.step
        tensors, options = here.make(torch.float32, device if impl == "triton" else "cpu", **sizes, T=1)
        token = here._token(tensors | options, 0)
        self._assert_meta_refused(step, token | {"state": tensors[here.state[0]], "impl": impl}, str)

    def _assert_meta_refused(self, function: Callable, arguments: dict[str, Any], named: Callable) -> None:
        names = {name: named(name) for name, x in arguments.items() if isinstance(x, Tensor) and named(name)}
        if arguments["impl"] == "reference":
            # make a valid call, which the cache of checks stores: the cache's signatures must then include the device
            function(**{key: x.clone() if isinstance(x, Tensor) else x for key, x in arguments.items()})
        # skip calls with a single tensor, which run on the device of this tensor without an error
        for name, shown in names.items() if len(names) > 1 else ():
            changed = {key: x.clone() if isinstance(x, Tensor) else x for key, x in arguments.items()}
            with no_launches(), pytest.raises(ValueError, match=rf"\b{re.escape(shown)} is on meta\b"):
                function(**changed | {name: arguments[name].to("meta")})

    def test_malformed_steps_are_refused_before_a_launch(self, bad_step, device):
        here: Any = self
        step, sizes = here.step
        tensors, options = here.make(torch.float32, **sizes, T=1)
        token = here._token(tensors | options, 0) | {"state": tensors[here.state[0]]}
        change, words = here.malformed_steps[bad_step]
        self._assert_refused(step, token, change, words, device)
