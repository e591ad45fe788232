"""What the backends call of `sgl_kernel`, or of what stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The library's functions, with its own signatures."""

    flash_attn_with_kvcache: Callable[..., Any]
    """Attention over a paged cache."""
    flash_attn_varlen_func: Callable[..., Any]
    """Attention over packed K and V. It takes a page table and ignores it."""
    merge_state_v2: Callable[..., Any]
    """Attention over two sets of keys, from outputs and natural-logarithm LSE [T, H] of each. Rows
    lie end to end, and one of both sides has keys: it looks at neither."""
    get_scheduler_metadata: Callable[..., torch.Tensor]
    """What the first function computes before it attends, where it is not handed over."""
