"""Where the card's factory stands: the one module that has the kernel library imported."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from attnmux.core import indices
from attnmux.core.context import BackendContext
from attnmux.core.errors import BackendFailed
from attnmux.nvidia.nsa.backend import NSABackend
from attnmux.nvidia.nsa.kernels import Kernels
from attnmux.nvidia.nsa.providers import PROVIDERS
from attnmux.nvidia.nsa.trial import measured_lse_unit
from attnmux.nvidia.trial import compiling, first_that_runs


def make(context: BackendContext, options: Mapping[str, object]) -> NSABackend:
    """The backend on the first package that is installed and runs on the context's device.

    Raises BackendFailed where none does, with what each said.
    """
    kernels, lse_unit = installed(context)
    return NSABackend(context, options, kernels, lse_unit=lse_unit)


def installed(context: BackendContext) -> tuple[Kernels, float]:
    """The first package that runs, with the lookup beside it, and what its LSE is multiplied by.

    Raises BackendFailed where none does, with what each said.
    """
    kernels, lse_unit = first_that_runs(
        "nvidia/nsa", PROVIDERS, lambda kernels: measured_lse_unit(kernels, context)
    )
    return replace(kernels, topk_slots=lookup(context)), lse_unit


def lookup(context: BackendContext) -> Callable[..., torch.Tensor]:
    """One launch where attnmux-triton is installed with its library, else several of torch; those
    too, with a warning, where Triton does not compile."""
    try:
        from attnmux.triton.picks import TopkSlots  # noqa: PLC0415  # another package's
    except ImportError:
        return indices.topk_slots
    topk_slots = TopkSlots()
    nowhere = torch.full((1, 1), -1, dtype=torch.int32, device=context.device)
    try:
        with compiling("nvidia/nsa", context.device, hint=""):
            topk_slots(nowhere, torch.zeros(1, dtype=torch.int64, device=context.device), nowhere)
    except BackendFailed as error:
        warnings.warn(f"nsa goes on without Triton: {error.reason}", stacklevel=2)
        return indices.topk_slots
    return topk_slots
