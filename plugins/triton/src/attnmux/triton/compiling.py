"""What a backend will launch, compiled before the first request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from triton import AsyncCompileMode

from attnmux.triton.launching import Rehearsed, current, failure_of


def compile_ahead(launches: Sequence[Rehearsed], device: torch.device) -> None:
    """Compile and load, in threads, all that was rehearsed; later calls launch it without binding.

    Triton keeps what it compiles on disk, so that the next process only loads it.
    Raises BackendFailed for the first that does not compile, or needs more of the device than it
    has.
    """

    with current(device), ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads:
        here = _with_index(device)

        def load(launch: Rehearsed, compiled: Any) -> None:  # noqa: ANN401  # no types of Triton's
            with current(here):  # each thread has to be told
                _load(launch, compiled)

        # What fails is asked for below: an error would leave the mode on.
        with AsyncCompileMode(threads, ignore_errors=True):
            begun = [
                launch.bound.kernel.warmup(*launch.values, grid=(1,), **launch.bound.options)
                for launch in launches
            ]
        compiled = [_finished(*pair) for pair in zip(launches, begun, strict=True)]
        # Each once: a second thread would be given a kernel that the first has loaded half of.
        each = {
            id(kernel): (launch, kernel) for launch, kernel in zip(launches, compiled, strict=True)
        }
        for _ in threads.map(lambda pair: load(*pair), each.values()):
            pass
    for launch, kernel in zip(launches, compiled, strict=True):
        launch.bound.keep(launch.key, kernel, launch.values, launch.tensors)


def _with_index(device: torch.device) -> torch.device:
    if device.index is not None or device.type == "cpu":
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _finished(launch: Rehearsed, compiled: Any) -> Any:  # noqa: ANN401  # as above
    """compiled: a CompiledKernel, or one that will be."""
    try:
        return compiled.result() if hasattr(compiled, "result") else compiled
    except Exception as error:  # whatever a compiler raises
        raise failure_of(launch.bound.kernel, error) from error


def _load(launch: Rehearsed, compiled: Any) -> None:  # noqa: ANN401  # as above
    try:
        # To ask for its launcher loads it, and finds what the device has too little of, each time.
        compiled[1, 1, 1]
    except Exception as error:  # whatever a driver raises
        raise failure_of(launch.bound.kernel, error) from error
