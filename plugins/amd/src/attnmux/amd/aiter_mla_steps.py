"""The arguments of AITER's assembly for MLA, from a layer and a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attnmux.amd.aiter_mla_work import PlannedWork
from attnmux.amd.slot_lists import SlotBuffers, SlotLists

if TYPE_CHECKING:
    from attnmux.core import BackendContext
    from attnmux.core.plugin import PageTables


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AiterMLALayer:
    """A layer's arguments that no step changes."""

    group: int
    """The result of `KVPool.group_of`."""
    rows: torch.Tensor | None
    """[slots, 1, 1, 576], the pool's memory; None for a layer that it does not store."""
    scale: float
    q_scale: torch.Tensor | None = None
    """[1] float32 on the device, 1; None in bfloat16."""
    kv_scale: torch.Tensor | None = None
    """[1] float32 on the device, the factor of rows; None in bfloat16."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AiterMLABuffers:
    """Fixed tensors that graphs replay with."""

    slots: SlotBuffers
    ones: torch.Tensor
    """[max_bs] int32."""
    kept: list[object] = field(default_factory=list)
    """The results of `get_meta_param` for each capture, or its planned work."""

    @classmethod
    def of(cls, max_bs: int, context: BackendContext) -> AiterMLABuffers:
        ones = torch.ones(max_bs, dtype=torch.int32, device=context.device)
        return cls(slots=SlotBuffers.of(max_bs, context), ones=ones)


@dataclass(kw_only=True, slots=True, eq=False)
class AiterMLAStep:
    """A step of any phase."""

    tables: PageTables
    """Its shape and the bounds of queries; no tables."""
    splits: bool
    """Whether `mla_decode_fwd` serves it, and not `mla_prefill_fwd`."""
    buffers: AiterMLABuffers | None
    last_page_lens: torch.Tensor
    """[B] int32: a page of the kernel is a token."""
    work: PlannedWork | None = None
    """Plan for heads that need one; for an eager step, set by `fill_step`."""
    cached: dict[int, SlotLists] | None = None
    """By group of the pool; set by `fill_step`."""
    hidden: torch.Tensor | None = None
    """[T, 1, 1] bool: rows whose result is 0, which see no key or belong to no request; set by
    `fill_step`."""


def one_each(slots: torch.Tensor, batch_size: int) -> torch.Tensor:
    """The list with room for a key of each request at least: over fewer in e4m3, `get_meta_param`
    splits them into 0 parts and fails. Nothing reads what follows the last key."""
    missing = batch_size - len(slots)
    return torch.nn.functional.pad(slots, (0, missing)) if missing > 0 else slots
