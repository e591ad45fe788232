"""KV pools, the request table, slot allocators and the prefix tree."""

from __future__ import annotations

from attnmux.core.kv.allocator import PagedAllocator, TokenAllocator
from attnmux.core.kv.foreign import ForeignKVPool, ForeignMLAPool, ForeignRequestTable
from attnmux.core.kv.joined import JoinedKVPool
from attnmux.core.kv.memory import SWASizes, swa_tokens_in_budget, tokens_in_budget
from attnmux.core.kv.pool import KVPool
from attnmux.core.kv.prefix_tree import PrefixMatch, PrefixTree
from attnmux.core.kv.request_table import BlockTable, ReqToTokenPool, RequestTable
from attnmux.core.kv.state_tree import StatePrefixTree
from attnmux.core.kv.swa import SWAAllocator, SWAKVPool, tokens_behind_window
from attnmux.core.kv.token_pools import MHATokenToKVPool, MLATokenToKVPool
from attnmux.core.kv.window_state_tree import WindowStatePrefixTree
from attnmux.core.kv.window_tree import WindowPrefixTree, WindowSpan

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
    "PrefixMatch",
    "PrefixTree",
    "ReqToTokenPool",
    "RequestTable",
    "SWAAllocator",
    "SWAKVPool",
    "SWASizes",
    "StatePrefixTree",
    "TokenAllocator",
    "WindowPrefixTree",
    "WindowSpan",
    "WindowStatePrefixTree",
    "swa_tokens_in_budget",
    "tokens_behind_window",
    "tokens_in_budget",
]
