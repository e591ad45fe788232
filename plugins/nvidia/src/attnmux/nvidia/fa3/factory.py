"""Where the card's factory stands: the one module that imports the kernel library."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_kernel import merge_state_v2  # type: ignore[import-not-found]  # an optional library
from sgl_kernel.flash_attn import (  # type: ignore[import-not-found]  # an optional library
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

from attnmux.core.context import BackendContext
from attnmux.nvidia.fa3.backend import FA3Backend
from attnmux.nvidia.fa3.kernels import Kernels
from attnmux.nvidia.fa3.trial import try_kernels

KERNELS = Kernels(
    flash_attn_with_kvcache=flash_attn_with_kvcache,
    flash_attn_varlen_func=flash_attn_varlen_func,
    get_scheduler_metadata=get_scheduler_metadata,
    merge_state_v2=merge_state_v2,
)


def make(context: BackendContext, options: Mapping[str, object]) -> FA3Backend:
    """The backend on the installed library.

    Raises BackendFailed where its kernels do not run on the context's device.
    """
    try_kernels(KERNELS, context)
    return FA3Backend(context, options, KERNELS)
