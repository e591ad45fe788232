"""Attention over several devices. Import from here, not from the modules."""

from attnmux.distributed.prefill_parallel import PrefillParallelBackend
from attnmux.distributed.split_context import split_context, split_request
from attnmux.distributed.zigzag import ZigzagStep, zigzag_step

__all__ = [
    "PrefillParallelBackend",
    "ZigzagStep",
    "split_context",
    "split_request",
    "zigzag_step",
]
