"""What the backend takes from flashinfer, so that tests can give it something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Classes and functions of flashinfer 0.6, by what they do. Signatures are the library's."""

    decode: Callable[..., Any]
    """`BatchDecodeWithPagedKVCacheWrapper`."""
    paged: Callable[..., Any]
    """`BatchPrefillWithPagedKVCacheWrapper`."""
    ragged: Callable[..., Any]
    """`BatchPrefillWithRaggedKVCacheWrapper`."""
    merge_state: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        tuple[torch.Tensor, torch.Tensor],
    ]
    """(v_a, s_a, v_b, s_b) → (v, s), with base-2 LSE."""
    fast_decode_plan: Callable[..., None]
    """`plan` of a decode wrapper over fixed buffers that the caller fills."""
