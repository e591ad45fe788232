"""What the backend calls of FlashMLA, whichever package it comes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The library's function; see `providers`."""

    flash_mla_sparse_fwd: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """(q, kv, indices, sm_scale, d_v, …): attention of each token over rows of kv of its own."""
    constants: Mapping[str, Any]
    """What it is told besides, at every call."""
