"""What the backend calls of `flash_attn.cute`, or of what stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The library's function, with its own signature."""

    flash_attn_varlen_func: Callable[..., Any]
    """Attention of packed queries, over a paged cache or over packed K and V. It allocates its
    output, and answers (output, LSE or None)."""
