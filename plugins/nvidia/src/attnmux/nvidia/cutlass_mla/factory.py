"""Where the card's factory stands: the one module that imports the kernel library."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_kernel import (  # type: ignore[import-not-found]  # an optional library
    cutlass_mla_decode,
    cutlass_mla_get_workspace_size,
)

from attnmux.core.context import BackendContext
from attnmux.nvidia.cutlass_mla.backend import CutlassMLABackend
from attnmux.nvidia.cutlass_mla.kernels import Kernels
from attnmux.nvidia.cutlass_mla.trial import try_kernels

KERNELS = Kernels(
    cutlass_mla_decode=cutlass_mla_decode,
    cutlass_mla_get_workspace_size=cutlass_mla_get_workspace_size,
)


def make(context: BackendContext, options: Mapping[str, object]) -> CutlassMLABackend:
    """The backend on the installed library.

    Raises BackendFailed where its kernel does not run on the context's device.
    """
    backend = CutlassMLABackend(context, options, KERNELS)
    try_kernels(KERNELS, context)
    return backend
