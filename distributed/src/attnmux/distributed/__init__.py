"""Attention over several devices. Import from here, not from the modules."""

from __future__ import annotations

from attnmux.distributed.agreement import AgreedStep, agree_on_step, idle_batch
from attnmux.distributed.data_parallel import PaddingMode, TokensOfRanks
from attnmux.distributed.errors import RankFailed, RanksDiffer
from attnmux.distributed.graphs import capture_on_all_ranks
from attnmux.distributed.heads import HeadSplit
from attnmux.distributed.interleaved_backend import InterleavedAttnBackend
from attnmux.distributed.interleaved_building import (
    InterleavedDecision,
    build_interleaved,
    decide_interleaved,
    decode_context,
    draft_context,
    prompt_context,
)
from attnmux.distributed.interleaved_kv import InterleavedKVPool, InterleavedTable
from attnmux.distributed.interleaving import Interleaving
from attnmux.distributed.merging import RankMerger, exchange_and_merge, merge_packed, pack
from attnmux.distributed.prefill_parallel import PrefillParallelBackend
from attnmux.distributed.ranks import Pending, RankGroup
from attnmux.distributed.ranks_alike import check_same_libraries, shared_launches
from attnmux.distributed.splitting import split_context
from attnmux.distributed.zigzag import ZigzagStep, can_be_split, zigzag_step

__all__ = [
    "AgreedStep",
    "HeadSplit",
    "InterleavedAttnBackend",
    "InterleavedDecision",
    "InterleavedKVPool",
    "InterleavedTable",
    "Interleaving",
    "PaddingMode",
    "Pending",
    "PrefillParallelBackend",
    "RankFailed",
    "RankGroup",
    "RankMerger",
    "RanksDiffer",
    "TokensOfRanks",
    "ZigzagStep",
    "agree_on_step",
    "build_interleaved",
    "can_be_split",
    "capture_on_all_ranks",
    "check_same_libraries",
    "decide_interleaved",
    "decode_context",
    "draft_context",
    "exchange_and_merge",
    "idle_batch",
    "merge_packed",
    "pack",
    "prompt_context",
    "shared_launches",
    "split_context",
    "zigzag_step",
]
