"""What the backend calls in every layer: FlashMLA, whichever package it comes in, and what finds
slots for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core import indices


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The library's function; see `providers`."""

    flash_mla_sparse_fwd: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """(q, kv, indices, sm_scale, d_v, …): attention of each token over rows of kv of its own."""
    constants: Mapping[str, Any]
    """What it is told besides, at every call."""
    topk_slots: Callable[..., torch.Tensor] = indices.topk_slots
    """What makes its indices of an indexer's picks: `attnmux.core.indices`', or one launch of the
    same results."""
