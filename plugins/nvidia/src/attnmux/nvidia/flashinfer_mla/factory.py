"""Where flashinfer is imported: called for the backend that was chosen."""

from __future__ import annotations

from collections.abc import Mapping

from flashinfer.mla import (  # type: ignore[import-not-found]  # an optional library
    BatchMLAPagedAttentionWrapper,
)

from attnmux.core.backend import NO_OPTIONS
from attnmux.core.context import BackendContext
from attnmux.nvidia.flashinfer_mla.backend import FlashInferMLABackend
from attnmux.nvidia.flashinfer_mla.kernels import Kernels

KERNELS = Kernels(paged=BatchMLAPagedAttentionWrapper)


def make(
    context: BackendContext, options: Mapping[str, object] = NO_OPTIONS
) -> FlashInferMLABackend:
    """The backend over the installed library.

    Raises BackendFailed where its kernels do not compile or do not run on the context's device.
    """
    return FlashInferMLABackend(context, options, KERNELS)
