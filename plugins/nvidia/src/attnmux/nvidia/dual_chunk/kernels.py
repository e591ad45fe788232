"""What the backend calls of `sgl_kernel.flash_attn`, or of what stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The library's functions, with its own signatures."""

    flash_attn_with_kvcache: Callable[..., Any]
    """Attention over a paged cache."""
