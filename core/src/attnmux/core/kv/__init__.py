"""KV pools, the request table and slot allocators."""

from __future__ import annotations

from attnmux.core.kv.allocator import PagedAllocator, TokenAllocator
from attnmux.core.kv.foreign import ForeignKVPool, ForeignMLAPool, ForeignRequestTable
from attnmux.core.kv.joined import JoinedKVPool
from attnmux.core.kv.memory import SWASizes, swa_tokens_in_budget, tokens_in_budget
from attnmux.core.kv.pool import KVPool
from attnmux.core.kv.request_table import BlockTable, ReqToTokenPool, RequestTable
from attnmux.core.kv.swa import SWAAllocator, SWAKVPool, tokens_behind_window
from attnmux.core.kv.token_pools import MHATokenToKVPool, MLATokenToKVPool

__all__ = [
    "BlockTable",
    "ForeignKVPool",
    "ForeignMLAPool",
    "ForeignRequestTable",
    "JoinedKVPool",
    "KVPool",
    "MHATokenToKVPool",
    "MLATokenToKVPool",
    "PagedAllocator",
    "ReqToTokenPool",
    "RequestTable",
    "SWAAllocator",
    "SWAKVPool",
    "SWASizes",
    "TokenAllocator",
    "swa_tokens_in_budget",
    "tokens_behind_window",
    "tokens_in_budget",
]
