"""The factory compiles ahead, tested with a Triton whose device launches nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import BackendFailed, Platform
from attnmux.testing import Case, decode, extend, make_setup, prepare_step

pytest.importorskip("triton")

CROSS = Case(
    name="cross",
    steps=(extend((0, 5), (0, 33), encoder=(7, 9)),),
    kv_dtype="fp8_e4m3",
    max_context_len=64,
)
"""On an SM90 its keys are widened, which is rehearsed with many new tokens."""
CASE = Case(name="plain", steps=(extend((0, 5), (0, 33)), decode(6, 34)), windows=(None, None))


class Driver:
    """An SM90 with that much shared memory."""

    def __init__(self, shared: int) -> None:
        self.utils, self.shared = self, shared
        self.launched: list[str] = []

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # noqa: PLC0415  # not the interpreter's

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return -1  # as `get_device()` of a tensor on the CPU

    def get_current_stream(self, index: int) -> int:
        return 0

    def get_device_properties(self, index: int) -> dict[str, int]:
        return {"max_shared_mem": self.shared, "multiprocessor_count": 132}

    def load_binary(self, name: str, *given: object) -> tuple[object, str, int, int, int]:
        time.sleep(0.05)  # so that threads meet
        return object(), name, 0, 0, 1024

    def launcher_cls(self, *given: object) -> Callable[..., None]:
        return lambda *args: self.launched.append(args[4])


def main(case: str) -> None:
    """Make the backend, take the steps, and print the launches."""
    import triton  # noqa: PLC0415  # not in the interpreter's process
    from triton.runtime import driver  # noqa: PLC0415  # as above

    from attnmux.triton.attention.factory import triton as made  # noqa: PLC0415  # as above
    from attnmux.triton.launches import bound_kernel  # noqa: PLC0415  # not in the interpreter's process

    device = Driver(4096 if case == "does not fit" else 232448)
    if case != "no driver":
        driver.set_active(device)
    platform = replace(Platform.parse("nvidia:sm90,cuda=13.0"), core_count=3)
    setup = make_setup(CROSS if case == "cross" else CASE, platform, "cpu")
    try:
        backend = made(setup.context, {})
    except BackendFailed as failure:
        print(json.dumps({"failed": failure.reason}))
        return
    if case == "cross":
        print(json.dumps({"widens": backend.widens}))
        return
    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
    bound: list[tuple[int, str]] = []
    as_triton_does = bound_kernel.BoundKernel._launch_unbound
    for step in CASE.steps:
        made_step = prepare_step(setup, step)
        backend.init_forward_metadata(made_step.batch)
        for given in made_step.inputs:

            def noted(self: Any, *rest: Any, layer: int = given.layer.layer_id) -> None:
                bound.append((layer, self.kernel.__name__))
                as_triton_does(self, *rest)

            bound_kernel.BoundKernel._launch_unbound = noted  # type: ignore[method-assign]  # looks on
            backend.forward(given.q, given.k, given.v, given.layer, made_step.batch)
    print(json.dumps({"compiled": compiled, "bound": bound, "launched": device.launched}))


@pytest.mark.turns(4, suite="compilers")
def test_no_step_waits_for_a_compiler(script):
    found = script("fits")[-1]
    assert found["compiled"] == []
    # The rehearsal could not know the strides of the second layer's inputs.
    assert [name for layer, name in found["bound"] if layer == 0] == []
    assert found["launched"] == [
        # Of tall tiles and of short ones
        *("sum_lens", "plan_tiles", "plan_tiles", *("write_kv", "attend_hopper_tiles") * 2),
        *("plan_shares", *("write_kv", "attend_shares") * 2),
    ]


def test_a_kernel_that_needs_more_than_the_device_has_fails_when_the_backend_is_made(script):
    assert "out of resource: shared memory" in script("does not fit")[-1]["failed"]


@pytest.mark.turns(4, suite="compilers")
def test_cross_attention_over_eight_bits_is_rehearsed(script):
    assert script("cross")[-1] == {"widens": True}


def test_a_triton_that_drives_no_device_fails_too(script):
    assert "drives no device here" in script("no driver")[-1]["failed"]


if __name__ == "__main__":
    main(sys.argv[1])
