"""Where the card's factory stands: the one module that has the kernel library imported."""

from __future__ import annotations

from collections.abc import Mapping

from attnmux.core.context import BackendContext
from attnmux.nvidia.flashmla.backend import FlashMLABackend
from attnmux.nvidia.flashmla.providers import PROVIDERS
from attnmux.nvidia.flashmla.trial import try_kernels
from attnmux.nvidia.trial import first_that_runs


def make(context: BackendContext, options: Mapping[str, object]) -> FlashMLABackend:
    """The backend on the first package that is installed and runs on the context's device.

    Raises BackendFailed where none does, with what each said.
    """
    kernels, _ = first_that_runs(
        "nvidia/flashmla", PROVIDERS, lambda kernels: try_kernels(kernels, context)
    )
    return FlashMLABackend(context, options, kernels)
