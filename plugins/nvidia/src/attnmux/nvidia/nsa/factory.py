"""Where the card's factory stands: the one module that has the kernel library imported."""

from __future__ import annotations

from collections.abc import Mapping

from attnmux.core.backend import BackendContext
from attnmux.nvidia.nsa.backend import NSABackend
from attnmux.nvidia.nsa.providers import PROVIDERS
from attnmux.nvidia.nsa.trial import measured_lse_unit
from attnmux.nvidia.trial import first_that_runs


def make(context: BackendContext, options: Mapping[str, object]) -> NSABackend:
    """The backend on the first package that is installed and runs on the context's device.

    Raises BackendFailed where none does, with what each said.
    """
    kernels, lse_unit = first_that_runs(
        "nvidia/nsa", PROVIDERS, lambda kernels: measured_lse_unit(kernels, context)
    )
    return NSABackend(context, options, kernels, lse_unit=lse_unit)
