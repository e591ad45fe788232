"""The factory compiles ahead, tested with a Triton whose device launches nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from attnmux.core import BackendFailed, Platform
from attnmux.testing import Case, decode, extend, make_setup, prepare_step, verify

pytest.importorskip("triton")

CROSS = Case(
    name="cross",
    steps=(extend((0, 5), (0, 33), encoder=(7, 9)),),
    kv_dtype="fp8_e4m3",
    max_context_len=64,
)
"""On an SM90 its keys are widened, which is rehearsed with many new tokens."""
LONG = Case(
    name="long",
    steps=(
        *(extend((0, 4000)), extend((2048, 2048)), extend((4096, 100)), extend((0, 600))),
        *(extend((0, 3000), (0, 1000)), extend((0, 2048), (100, 1), (2000, 1))),
        *(extend(*[(0, 100)] * 16), decode(4000), decode(*[100] * 33), verify(8, 4000)),
    ),
    num_q_heads=24,
    num_kv_heads=8,
    head_dim=128,
    spec_topk=1,
    max_context_len=8192,
)
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


def kind_of(launch: Any) -> object:
    """What a kernel is compiled for: its constants, and what the compiler assumes of the rest."""

    def assumed(place: int, value: Any) -> object:
        parameter = launch.bound.kernel.params[place]
        if isinstance(value, torch.Tensor):
            return value.dtype, value.data_ptr() % 16 == 0
        if parameter.is_constexpr or not isinstance(value, int):
            return value
        return not parameter.do_not_specialize and (value == 1, value % 16 == 0)

    values = tuple(assumed(place, value) for place, value in enumerate(launch.values))
    return launch.bound.kernel, *launch.bound.options.items(), values


def unrehearsed(case: Case) -> list[str]:
    """The kernels that some step of the case would compile."""
    from attnmux.triton.attention.backend import TritonBackend  # noqa: PLC0415  # not in the interpreter's process
    from attnmux.triton.attention.warmup import rehearse  # noqa: PLC0415  # as above

    missing: list[str] = []
    for step in case.steps:
        setup = make_setup(case, Platform.parse("nvidia:sm90"), "cpu")
        backend = TritonBackend(setup.context, {}, compute_units=132)
        launches = backend.launcher.rehearse(lambda: rehearse(backend, setup.context))  # noqa: B023  # called here
        known = {kind_of(launch) for launch in launches}
        made = prepare_step(setup, step, host_lens=case.host_lens)

        def take() -> None:
            backend.init_forward_metadata(made.batch)  # noqa: B023  # as above
            for given in made.inputs:  # noqa: B023  # as above
                backend.forward(given.q, given.k, given.v, given.layer, made.batch)  # noqa: B023  # as above

        taken = backend.launcher.rehearse(take)
        missing += [f"{step}: {one.bound.kernel}" for one in taken if kind_of(one) not in known]
    return missing


def main(case: str) -> None:
    """Make the backend, take the steps, and print the launches."""
    import triton  # noqa: PLC0415  # not in the interpreter's process
    from triton.runtime import driver  # noqa: PLC0415  # as above

    from attnmux.triton.attention.factory import triton as made  # noqa: PLC0415  # as above
    from attnmux.triton.launches import bound_kernel  # noqa: PLC0415  # not in the interpreter's process

    if case == "long":
        kinds = {"kv_dtype": (None, "fp8_e4m3"), "host_lens": (False, True)}
        cases = [
            replace(LONG, **dict(zip(kinds, each, strict=True)))
            for each in product(*kinds.values())
        ]
        print(json.dumps({"unrehearsed": [name for each in cases for name in unrehearsed(each)]}))
        return
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


def test_long_prompts_and_drafts_are_rehearsed(script):
    assert script("long")[-1] == {"unrehearsed": []}


def test_a_kernel_that_needs_more_than_the_device_has_fails_when_the_backend_is_made(script):
    assert "out of resource: shared memory" in script("does not fit")[-1]["failed"]


@pytest.mark.turns(4, suite="compilers")
def test_cross_attention_over_eight_bits_is_rehearsed(script):
    assert script("cross")[-1] == {"widens": True}


def test_a_triton_that_drives_no_device_fails_too(script):
    assert "drives no device here" in script("no driver")[-1]["failed"]


if __name__ == "__main__":
    main(sys.argv[1])
