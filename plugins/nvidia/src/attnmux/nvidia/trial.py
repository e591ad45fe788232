"""Launches before the first step: has a library kernels for this device, and for these dims?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeVar

import torch

from attnmux.core.errors import AttnmuxError, BackendFailed, in_brief

K = TypeVar("K")
T = TypeVar("T")


@contextmanager
def trial(address: str, device: torch.device, *failures: type[Exception]) -> Iterator[None]:
    """Launches of the block are waited for: a build for other devices imports, and fails when it is
    launched.

    failures: what the library raises besides RuntimeError.
    Raises BackendFailed, for the backend of that address, with what the library said.
    """
    caught: tuple[type[Exception], ...] = (RuntimeError, *failures)
    try:
        yield
        _wait(device)
    except caught as error:
        raise BackendFailed(address, in_brief(error)) from error


@contextmanager
def compiling(address: str, device: torch.device, hint: str) -> Iterator[None]:
    """As `trial`, for libraries that compile their kernels when they are first called: they fail
    with whatever the compilers below them come to. A full device is no such failure.

    hint: what to do about it.
    """
    try:
        yield
        _wait(device)
    except (AttnmuxError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise BackendFailed(address, in_brief(error), hint=hint) from error


def first_that_runs(
    address: str,
    providers: Mapping[str, Callable[[Any], K]],
    try_kernels: Callable[[K], T],
) -> tuple[K, T]:
    """The kernels of the first package that is installed and passes its trial, and what that gave.

    providers: what a package's module comes to, by the module's name, in the order of trial.
    Raises BackendFailed where none passes, with what each said.
    """
    reasons: list[str] = []
    for module, provide in providers.items():
        try:
            kernels = provide(import_module(module))
            return kernels, try_kernels(kernels)
        except (ImportError, OSError, AttributeError) as error:  # the last: of another version
            reasons.append(f"{module}: {in_brief(error)}")
        except BackendFailed as error:
            reasons.append(f"{module}: {error.reason}")
    raise BackendFailed(address, "; ".join(reasons))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
