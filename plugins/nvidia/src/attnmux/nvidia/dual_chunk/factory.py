"""Where the card's factory stands: the one module that imports the kernel library."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_kernel.flash_attn import (  # type: ignore[import-not-found]  # an optional library
    flash_attn_with_kvcache,
)

from attnmux.core.context import BackendContext
from attnmux.nvidia.dual_chunk.backend import DualChunkBackend
from attnmux.nvidia.dual_chunk.kernels import Kernels
from attnmux.nvidia.dual_chunk.trial import try_kernels

KERNELS = Kernels(flash_attn_with_kvcache=flash_attn_with_kvcache)


def make(context: BackendContext, options: Mapping[str, object]) -> DualChunkBackend:
    """The backend on the installed library.

    Raises BackendFailed where its kernels do not run on the context's device.
    """
    try_kernels(KERNELS, context)
    return DualChunkBackend(context, options, KERNELS)
