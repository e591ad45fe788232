"""What the backend calls of flashinfer 0.6, or of what stands in for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The library's functions, with its own signatures. Each runs on some devices alone."""

    xqa_batch_decode_with_kv_cache: Callable[..., Any]
    """Decode and verify on SM90 and SM120."""
    trtllm_batch_decode_with_kv_cache: Callable[..., Any]
    """Decode and verify on SM100."""
    trtllm_fmha_v2_prefill: Callable[..., Any]
    """Prefill on SM90 and SM120."""
    trtllm_batch_context_with_kv_cache: Callable[..., Any]
    """Prefill on SM100."""
