"""Slots of KV pools: how many a budget of memory pays for, and handing them out in whole pages."""

from __future__ import annotations

from attnmux.transformers.requests.slots.paged import PagedAllocator
from attnmux.transformers.requests.slots.sizes import (
    SWASizes,
    swa_tokens_in_budget,
    tokens_in_budget,
)
from attnmux.transformers.requests.slots.windows import SWAAllocator

__all__ = ["PagedAllocator", "SWAAllocator", "SWASizes", "swa_tokens_in_budget", "tokens_in_budget"]
