"""Where keys and values live, which request owns which slot, and how slots are handed out."""

from __future__ import annotations

from attnmux.core.kv.allocator import PagedAllocator, TokenAllocator
from attnmux.core.kv.mha import MHATokenToKVPool
from attnmux.core.kv.mla import MLATokenToKVPool
from attnmux.core.kv.planning import SWASizes, swa_tokens_in_budget, tokens_in_budget
from attnmux.core.kv.pool import KVPool
from attnmux.core.kv.prefix_tree import PrefixMatch, PrefixTree
from attnmux.core.kv.request_table import ReqToTokenPool
from attnmux.core.kv.swa import SWAKVPool
from attnmux.core.kv.swa_allocator import SWAAllocator, tokens_behind_window

__all__ = [
    "KVPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "PagedAllocator",
    "PrefixMatch",
    "PrefixTree",
    "ReqToTokenPool",
    "SWAAllocator",
    "SWAKVPool",
    "SWASizes",
    "TokenAllocator",
    "swa_tokens_in_budget",
    "tokens_behind_window",
    "tokens_in_budget",
]
