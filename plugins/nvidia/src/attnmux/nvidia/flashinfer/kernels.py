"""What the backend takes from flashinfer, so that tests can give it something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkVariant:
    """What paged wrappers are compiled from with sinks."""

    source: str
    """`attention_sink_decl["fa2"]`."""
    module_name: Callable[..., str]
    """`get_batch_prefill_attention_sink_uri`: for every dtype, dim and kind of window its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Classes and functions of flashinfer 0.6, by what they do. Signatures are the library's."""

    decode: Callable[..., Any]
    """`BatchDecodeWithPagedKVCacheWrapper`."""
    paged: Callable[..., Any]
    """`BatchPrefillWithPagedKVCacheWrapper`."""
    ragged: Callable[..., Any]
    """`BatchPrefillWithRaggedKVCacheWrapper`."""
    merge_state_in_place: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    """(v, s, v_other, s_other): (v, s) becomes the state of both, with base-2 LSE."""
    fast_decode_plan: Callable[..., None]
    """`plan` of a decode wrapper over fixed buffers that the caller fills."""
    sinks: SinkVariant | None = None
    """None: layers with sinks are refused."""
