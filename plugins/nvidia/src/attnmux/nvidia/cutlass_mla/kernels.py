"""What the backend calls of `sgl_kernel`, or of what stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The library's functions, with its own signatures."""

    cutlass_mla_decode: Callable[..., torch.Tensor]
    """Attention of one query a request over a paged cache."""
    cutlass_mla_get_workspace_size: Callable[..., int]
    """Bytes of scratch memory that it takes, which it does not check."""
