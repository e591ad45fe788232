"""What the backend calls of flashinfer 0.6, or of what stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The library's functions, with its own signatures. Each runs on some devices alone."""

    trtllm_batch_decode_with_kv_cache_mla: Callable[..., Any]
    """On SM100."""
    xqa_batch_decode_with_kv_cache_mla: Callable[..., Any]
    """On SM120, one query a request."""
