"""Repeats a step, and finds what grows with each repetition and what another instance disturbs."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from attnmux.testing.cases.steady import repetition
from attnmux.testing.run.candidate import Candidate
from attnmux.testing.run.comparison import Disagreement, compare, output_tolerance
from attnmux.testing.run.execution import EagerExecution, Execution, call_layer
from attnmux.testing.run.side_effects import SideEffects
from attnmux.testing.setup.placement import fill_reserved_page
from attnmux.testing.setup.prepared import PreparedStep, prepare_step

WARM_UP = 4
"""Repetitions in which caches may fill and pools of threads start."""
INSTANCES = 8
"""Instances that are made one after the other, the warm-up included."""
MIB = 1 << 20


class Growth(NamedTuple):
    """A quantity of the process that may not grow with each step."""

    name: str
    remedy: str
    read: Callable[[torch.device], int]
    least: int = 1
    """Growth in one repetition that counts."""
    has_caches: bool = False
    """It grows with new lengths, for which libraries keep kernels, and must not grow when the same
    lengths come again."""


def _live_tensors() -> Iterator[torch.Tensor]:
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            yield item


def _tensor_bytes(_: torch.device) -> int:
    storages = (tensor.untyped_storage() for tensor in _live_tensors() if not tensor.is_sparse)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _entries(folder: str) -> int:
    """Entries of a folder of /proc; 0 on a system without it."""
    path = Path("/proc/self", folder)
    return len(os.listdir(path)) if path.exists() else 0


def _resident(_: torch.device) -> int:
    """Without pages of files, which the system takes back when others need memory; 0 on a system
    without /proc."""
    path = Path("/proc/self/statm")
    if not path.exists():
        return 0
    resident, of_files = map(int, path.read_text().split()[1:3])
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


KEEP_NONE = "keep no tensor and no batch of a step after the next one is prepared"
GROWTHS = (
    Growth("live tensors", KEEP_NONE, lambda _: sum(1 for _ in _live_tensors())),
    Growth("bytes of live tensors", KEEP_NONE, _tensor_bytes),
    Growth(
        "blocks of Python's objects",
        "bound the caches and lists that a step adds to",
        lambda _: sys.getallocatedblocks(),
        64,
    ),
    Growth(
        "bytes of memory of the process",
        "free what a step allocates on the host",
        _resident,
        MIB,
        has_caches=True,
    ),
    Growth(
        "threads of Python",
        "start threads once, and end those of an instance with it",
        lambda _: threading.active_count(),
    ),
    Growth(
        "threads of the process",
        "start threads once, and end those of an instance with it",
        lambda _: _entries("task"),
    ),
    Growth("open files", "close what a step opens", lambda _: _entries("fd")),
)
DEVICE_GROWTHS = (
    Growth(
        "bytes of device memory",
        KEEP_NONE,
        lambda device: int(torch.accelerator.memory_allocated(device)),
    ),
)


def check_steady(
    candidate: Candidate,
    execution: Execution,
    effects: SideEffects,
    *,
    host_lens: bool,
) -> None:
    """Repeat the case's first step on one instance, and if it runs eagerly, on others of the same
    context. A case without repeats is not repeated.

    Raises Disagreement if anything grows, and if an instance changes the answer of another.
    """
    setup, backend = execution.setup, execution.backend
    device, repeats = setup.context.device, setup.case.repeats
    if not repeats:
        return
    first = setup.case.steps[0]
    fill = backend.select(first.mode).get_cuda_graph_seq_len_fill_value()

    def prepare(number: int) -> PreparedStep:
        step = repetition(first, number)
        prepared = prepare_step(setup, step, seq_len_fill=fill, host_lens=host_lens)
        if execution.pads:
            fill_reserved_page(setup)
        return prepared

    with effects.watch("a repeated step"):
        _check_growth(lambda number: execution.run(prepare(number)), repeats, device, "repetition")
    if setup.case.graph:
        return
    step = prepare(0)

    def use_another(_: int) -> None:
        other = candidate.build(setup.context)
        EagerExecution(setup, other, host_lens=host_lens).run(step)

    with effects.watch("another instance"):
        _check_growth(use_another, INSTANCES, device, "instance")
        if not step.batch.forward_mode.is_target_verify():
            _check_interleaved(candidate, execution, step, host_lens=host_lens)


def _check_growth(
    repeat: Callable[[int], object], repeats: int, device: torch.device, what: str
) -> None:
    """Raises Disagreement if a quantity never falls after the warm-up and rises in half of the
    repetitions or more."""
    growths = GROWTHS if device.type == "cpu" else GROWTHS + DEVICE_GROWTHS
    grown = _measure(growths, repeat, repeats, device)
    seen_before = [growth for growth in grown if growth.has_caches]
    still = _measure(seen_before, repeat, repeats, device) if seen_before else {}
    faults = [
        f"{growth.name} grow with each {what}: expected {values[0]} as after {WARM_UP}, got "
        f"{values[-1]} after {repeats}; {growth.remedy}"
        for growth, values in grown.items()
        if not growth.has_caches or growth in still
    ]
    if faults:
        raise Disagreement("; and ".join(faults))


def _measure(
    growths: Sequence[Growth],
    repeat: Callable[[int], object],
    repeats: int,
    device: torch.device,
) -> dict[Growth, list[int]]:
    """The quantities that grow, with their values from the warm-up on."""
    # Made before, so that the lists are not among the new objects
    readings = {growth: [0] * (repeats - WARM_UP + 1) for growth in growths}
    with _only_new_objects():
        for number in range(repeats):
            repeat(number)
            if number + 1 < WARM_UP:
                continue
            gc.collect()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            for growth, values in readings.items():
                values[number + 1 - WARM_UP] = growth.read(device)
    return {growth: values for growth, values in readings.items() if _grows(values, growth.least)}


def _grows(values: Sequence[int], least: int) -> bool:
    rises = [after - before for before, after in pairwise(values)]
    return min(rises) >= 0 and 2 * sum(rise >= least for rise in rises) >= len(rises)


@contextmanager
def _only_new_objects() -> Iterator[None]:
    """Hides the objects that exist from the garbage collector, which then takes no time."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _check_interleaved(
    candidate: Candidate, execution: Execution, step: PreparedStep, *, host_lens: bool
) -> None:
    """Raises Disagreement if a step of another instance changes a step that is prepared."""
    setup, backend, batch = execution.setup, execution.backend, step.batch
    alone = execution.run(step)
    other = candidate.build(setup.context)
    backend.init_forward_metadata(batch)
    part, _ = step.of_request(batch.batch_size - 1)
    in_pool = tuple(replace(given, k=None, v=None, k_rope=None) for given in part.inputs)
    part = replace(part, inputs=in_pool)
    EagerExecution(setup, other, host_lens=host_lens).run(part)
    tolerance = output_tolerance(
        step.inputs[0].q.dtype,
        setup.context.token_to_kv_pool.dtype,
        fp8_products=candidate.fp8_products,
    )
    for index, (given, expected) in enumerate(zip(step.inputs, alone, strict=True)):
        output = call_layer(setup, backend, given, batch, step.num_request_tokens, index)
        name = f"layer {given.layer.layer_id} after another instance's step"
        try:
            compare(name, output.out, expected.out.double(), tolerance)
        except Disagreement as fault:
            raise Disagreement(
                f"{fault}; keep a prepared step in memory of the instance: "
                "context.workspace is scratch of one call"
            ) from fault
