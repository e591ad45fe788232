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
    merge_state_in_place: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    """(v, s, v_other, s_other): (v, s) becomes the state of both, with base-2 LSE."""
    fast_decode_plan: Callable[..., None]
    """`plan` of a decode wrapper over fixed buffers that the caller fills."""
