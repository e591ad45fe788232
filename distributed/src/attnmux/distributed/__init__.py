"""Attention over several devices. Import from here, not from the modules."""

from attnmux.distributed.agreement import AgreedStep, agree_on_step, idle_batch
from attnmux.distributed.data_parallel import PaddingMode, TokensOfRanks
from attnmux.distributed.graphs import capture_on_all_ranks

__all__ = [
    "AgreedStep",
    "PaddingMode",
    "TokensOfRanks",
    "agree_on_step",
    "capture_on_all_ranks",
    "idle_batch",
]
