"""What the backend calls of FlashMLA, whichever package it comes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """The library's functions; see `providers`."""

    flash_mla_with_kvcache: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Attention over a paged cache, with the library's own signature."""
    schedule: Callable[[torch.Tensor, int, bool], Sequence[torch.Tensor]]
    """(lengths [B] int32, queries times heads of a request, whether Q and cache are e4m3): which
    keys each thread block takes, [parts, 8] int32, and where the parts of each request begin,
    [B + 1] int32. One launch that reads the lengths on the device; only parts depends on the
    device, and it falls as there are more queries."""
    schedule_arguments: Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]
    """What `flash_mla_with_kvcache` is told of those two tensors, by its names."""
    constants: Mapping[str, Any]
    """What it is told besides, at every call."""
