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
        for _ in threads.map(load, launches, begun):
            pass


def _with_index(device: torch.device) -> torch.device:
    if device.index is not None or device.type == "cpu":
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _load(launch: Rehearsed, compiled: Any) -> None:  # noqa: ANN401  # as above
    """compiled: a CompiledKernel, or one that will be."""
    bound = launch.bound
    try:
        ready = compiled.result() if hasattr(compiled, "result") else compiled
        # To ask for it loads it, and finds what the device has too little of.
        ready.run  # noqa: B018  # a property
    except Exception as error:  # whatever a compiler or a driver raises
        raise failure_of(bound.kernel, error) from error
    bound.keep(launch.key, ready, launch.values, launch.tensors)
