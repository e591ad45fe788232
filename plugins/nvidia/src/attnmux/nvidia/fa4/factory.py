"""Where the card's factory stands: the one module that imports the kernel library."""

from __future__ import annotations

from collections.abc import Mapping

from flash_attn.cute import (  # type: ignore[import-not-found]  # an optional library
    flash_attn_varlen_func,
)

from attnmux.core.context import BackendContext
from attnmux.nvidia.fa4.backend import FA4Backend
from attnmux.nvidia.fa4.compiling import compile_kernels
from attnmux.nvidia.fa4.kernels import Kernels

KERNELS = Kernels(flash_attn_varlen_func=flash_attn_varlen_func)


def make(context: BackendContext, options: Mapping[str, object]) -> FA4Backend:
    """The backend on the installed library.

    Raises BackendFailed where its kernels do not compile or do not run on the context's device.
    """
    backend = FA4Backend(context, options, KERNELS)
    compile_kernels(backend.calls, KERNELS, context)
    return backend
