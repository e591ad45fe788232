from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import AttentionCall, AttnmuxError, BackendFailed, Platform
from attnmux.testing import Case, decode, extend, make_setup, prepare_step

pytest.importorskip("triton")

from triton import knobs
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.errors import TritonError

from attnmux.triton.attention.backend import TritonBackend
from attnmux.triton.attention.step import LEAST_BATCH
from attnmux.triton.attention.warmup import compile_ahead, rehearse
from attnmux.triton.launches import bound_kernel
from attnmux.triton.launches.bound_kernel import (
    MOST_VARIANTS,
    BoundKernel,
    Launcher,
    RehearsedLaunch,
)

TARGET = GPUTarget("cuda", 90, 32)
ALIGNED = torch.zeros(64, dtype=torch.int32)
OTHER = torch.zeros(64, dtype=torch.int32)


class Parameter:
    def __init__(self, *, any_alignment: bool) -> None:
        self.do_not_specialize_on_alignment = any_alignment


class Compiled:
    """The result of a launch through Triton."""

    function, packed_metadata = "function", "packed"

    def __init__(self, launched: list[Any]) -> None:
        self.metadata = type("Metadata", (), {"target": TARGET})
        self.run = lambda *given: launched.append(given)


class Kernel:
    """A JITFunction that records its launches: `bound` by Triton, and `direct` ones."""

    arg_names = ("x", "anywhere", "stride", "count", "WIDTH")
    __name__ = "kernel"

    def __init__(self, error: Exception | None = None) -> None:
        self.params = [Parameter(any_alignment=name == "anywhere") for name in self.arg_names]
        self.bound: list[Any] = []
        self.direct: list[Any] = []
        self.error = error

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Compiled:
            if self.error is not None:
                raise self.error
            self.bound.append((grid, args, options))
            return Compiled(self.direct)

        return launch


class Driver:
    current = -1  # as `get_device()` of a tensor on the CPU

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, index: int) -> int:
        return 7


@pytest.fixture
def driver(monkeypatch):
    found = Driver()
    monkeypatch.setattr(bound_kernel, "driver", type("Config", (), {"active": found}))
    return found


def bound(kernel: Kernel, launcher: Launcher | None = None) -> BoundKernel:
    return BoundKernel(
        launcher or Launcher(),
        kernel,
        {"WIDTH": 16},
        tensors=("x", "anywhere"),
        numbers=("stride",),
        counts=("count",),
        options={"num_warps": 4},
    )


def test_the_second_call_of_a_kind_is_not_bound_again(driver):
    kernel = Kernel()
    call = bound(kernel)
    call((2, 3, 1), (ALIGNED, OTHER), (8,), (5,), torch.int32)
    options = {"enable_fp_fusion": True, "num_warps": 4}
    assert kernel.bound == [((2, 3, 1), (ALIGNED, OTHER, 8, 5, 16), options)]
    call((4, 1, 1), (OTHER, ALIGNED), (8,), (6,), torch.int32)
    values = OTHER.data_ptr(), ALIGNED.data_ptr(), 8, 6, 16
    assert kernel.direct == [(4, 1, 1, 7, "function", "packed", None, None, None, *values)]
    assert len(kernel.bound) == 1


@pytest.mark.parametrize(
    ("tensors", "stride", "dtype"),
    [
        ((ALIGNED, OTHER), 9, torch.int32),
        ((ALIGNED, OTHER), 8, torch.int64),
        ((ALIGNED[1:], OTHER), 8, torch.int32),
    ],
    ids=["another stride", "another dtype", "an address less aligned"],
)
def test_other_assumptions_of_the_compiler_are_bound(driver, tensors, stride, dtype):
    kernel = Kernel()
    call = bound(kernel)
    call((1, 1, 1), (ALIGNED, OTHER), (8,), (5,), torch.int32)
    call((1, 1, 1), tensors, (stride,), (5,), dtype)
    assert (len(kernel.bound), len(kernel.direct)) == (2, 0)
    # The first variant is kept.
    call((1, 1, 1), (ALIGNED, OTHER), (8,), (5,), torch.int32)
    assert (len(kernel.bound), len(kernel.direct)) == (2, 1)


def test_an_argument_without_alignment_may_have_any_address(driver):
    kernel = Kernel()
    call = bound(kernel)
    call((1, 1, 1), (ALIGNED, OTHER), (8,), (5,))
    call((1, 1, 1), (ALIGNED, OTHER[1:]), (8,), (5,))
    assert (len(kernel.bound), len(kernel.direct)) == (1, 1)


def test_a_variant_for_an_address_that_is_not_aligned_is_not_kept(driver):
    kernel = Kernel()
    call = bound(kernel)
    for tensor in (ALIGNED[1:], ALIGNED):
        call((1, 1, 1), (tensor, OTHER), (8,), (5,))
    assert (len(kernel.bound), len(kernel.direct)) == (2, 0)


def test_a_launch_with_hooks_goes_through_triton(driver):
    kernel = Kernel()
    call = bound(kernel)
    call((1, 1, 1), (ALIGNED, OTHER), (8,), (5,))

    def hook(_: object) -> None:
        pass

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        call((1, 1, 1), (ALIGNED, OTHER), (8,), (5,))
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert (len(kernel.bound), len(kernel.direct)) == (2, 0)


def test_further_assumptions_are_checked_at_every_call(driver, monkeypatch):
    class Ranged(BaseBackend):
        @staticmethod
        def get_tensor_specialization(arg, **_):
            return "S" if arg.numel() < 50 else ""

    monkeypatch.setattr(bound_kernel, "make_backend", lambda target: Ranged)
    kernel = Kernel()
    call = bound(kernel)
    for x in (ALIGNED, ALIGNED, ALIGNED[:40]):
        call((1, 1, 1), (x, OTHER), (8,), (5,))
    assert (len(kernel.bound), len(kernel.direct)) == (2, 1)


def test_strides_that_never_come_back_do_not_fill_the_memory(driver):
    call = bound(Kernel())
    for stride in range(3 * MOST_VARIANTS):
        call((1, 1, 1), (ALIGNED, OTHER), (stride,), (5,))
    assert len(call._variants) <= MOST_VARIANTS


def test_a_kernel_that_does_not_compile_raises():
    call = bound(Kernel(TritonError("out of resource: shared memory")))
    with pytest.raises(BackendFailed, match="kernel does not compile: TritonError: out of"):
        call((1, 1, 1), (ALIGNED, OTHER), (8,), (5,))


class Loading:
    """Loads on first access, and is only half loaded for a while."""

    packed_metadata = "packed"
    metadata = Compiled([]).metadata

    def __init__(self) -> None:
        self.loads = 0
        self.function: str | None = None

    @property
    def run(self) -> Any:
        if not self.loads:
            self.loads += 1
            time.sleep(0.05)
            self.function = "function"
        return print

    def __getitem__(self, grid: Any) -> Any:
        return self.run


def test_a_kernel_of_many_layers_is_loaded_once_and_wholly(driver):
    compiled, kernel = Loading(), Kernel()
    kernel.warmup = lambda *args, **options: compiled
    launcher = Launcher()
    layers = [bound(kernel, launcher) for _ in range(8)]

    def step() -> None:
        for layer in layers:
            layer((1, 1, 1), (ALIGNED, OTHER), (8,), (5,))

    compile_ahead(launcher.rehearse(step), torch.device("cpu"))
    assert compiled.loads == 1
    for layer in layers:
        (variant,) = layer._variants.values()
        assert variant.launched[0] == "function"


MLA = {
    "kind": "mla",
    "num_q_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
}


STEPS = (extend((0, 5), (0, 33)), decode(45, 3))
ACROSS = (extend((0, 5), (0, 3), encoder=(12, 0)), decode(6, 1, encoder=(12, 0)))


@pytest.mark.parametrize(
    "case",
    [
        Case(name="plain", steps=STEPS),
        Case(name="window", steps=STEPS, windows=(8, None)),
        Case(name="8-bit", steps=STEPS, kv_dtype="fp8_e5m2"),
        Case(name="latent", steps=STEPS, **MLA),
        Case(name="cross", steps=ACROSS),
    ],
    ids=lambda case: case.name,
)
def test_every_launch_of_a_step_was_rehearsed(case):
    """No request has to compile: the rehearsal has its kernels, constants and kinds of values."""
    setup = make_setup(case, Platform.parse("nvidia:sm90,cuda=13.0"), "cpu")
    backend = TritonBackend(setup.context, {}, compute_units=3)
    rehearsed = backend.launcher.rehearse(lambda: rehearse(backend, setup.context))
    call = AttentionCall(torch.zeros(1, 4, 16), None, None, setup.context.layers[0])
    with pytest.raises(AttnmuxError, match="no step is prepared"):
        backend.forward_decode(call, None)

    def steps() -> None:
        for step in case.steps:
            made = prepare_step(setup, step)
            backend.init_forward_metadata(made.batch)
            for given in made.inputs:
                backend.forward(
                    given.q,
                    given.k,
                    given.v,
                    given.layer,
                    made.batch,
                    q_rope=given.q_rope,
                    k_rope=given.k_rope,
                )

    needed = {kind(launch) for launch in backend.launcher.rehearse(steps)}
    assert needed <= {kind(launch) for launch in rehearsed}


def kind(launch: RehearsedLaunch) -> tuple[object, ...]:
    """The kernel and its specialisation; of counts only their type."""
    counts = {"batch_size", "num_tokens", "num_tiles"}
    names = launch.bound.kernel.arg_names

    def told(name: str, value: Any) -> object:
        if isinstance(value, torch.Tensor):
            return value.dtype
        if name in counts or isinstance(value, float):
            return type(value)
        is_stride = name.endswith("stride") and value != 1
        return value % 16 == 0 if is_stride else value

    values = [told(name, value) for name, value in zip(names, launch.values, strict=True)]
    return launch.bound.kernel.__name__, *values


def test_all_batches_up_to_the_least_share_a_plan_and_larger_ones_are_rehearsed():
    case = Case(name="plain", steps=(decode(45, 3),))
    setup = make_setup(case, Platform.parse("nvidia:sm90,cuda=13.0"), "cpu")
    context = replace(setup.context, max_batch_size=600)
    backend = TritonBackend(context, {}, compute_units=3)
    rehearsed = backend.launcher.rehearse(lambda: rehearse(backend, context))
    for name in ("plan_shares", "plan_tiles"):
        plans = [launch for launch in rehearsed if launch.bound.kernel.__name__ == name]
        place = plans[0].bound.kernel.arg_names.index("BLOCK_B")
        blocks = {launch.values[place] for launch in plans}
        assert blocks == {LEAST_BATCH, 2 * LEAST_BATCH, 4 * LEAST_BATCH}


def test_an_encoder_is_rehearsed_without_decode():
    case = Case(name="encoder", steps=(extend((0, 5)),), is_encoder=True, save_kv_cache=False)
    setup = make_setup(case, Platform.parse("nvidia:sm90,cuda=13.0"), "cpu")
    backend = TritonBackend(setup.context, {}, compute_units=3)
    found = backend.launcher.rehearse(lambda: rehearse(backend, setup.context))
    assert {launch.bound.kernel.__name__ for launch in found} >= {"attend_tiles", "plan_tiles"}
