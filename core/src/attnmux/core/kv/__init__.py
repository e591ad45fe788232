"""KV pools and the request table."""

from __future__ import annotations

from attnmux.core.kv.foreign import ForeignKVPool, ForeignMLAPool, ForeignRequestTable
from attnmux.core.kv.joined import JoinedKVPool
from attnmux.core.kv.pool import KVPool
from attnmux.core.kv.request_table import BlockTable, ReqToTokenPool, RequestTable
from attnmux.core.kv.swa import SWAKVPool, tokens_behind_window
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
    "ReqToTokenPool",
    "RequestTable",
    "SWAKVPool",
    "tokens_behind_window",
]
