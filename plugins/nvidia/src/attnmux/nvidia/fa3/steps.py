"""Steps of FlashAttention 3, and the buffers that graphs replay them with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attnmux.core.plugin import KeyGroup, Keys, PageTables
from attnmux.nvidia.fa3.layers import FA3Kernels, FA3Schedule

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch
from typing import TYPE_CHECKING

from attnmux.nvidia.listed_keys import listed

if TYPE_CHECKING:
    import torch

    from attnmux.core import BackendContext, ForwardBatch


def draft_keys(
    batch: ForwardBatch, visible: torch.Tensor, group: KeyGroup, context: BackendContext
) -> Keys:
    """The slots that each draft token sees among the drafts: a table [B·d, d] and lengths [B·d].

    visible: [B, d, d] bool, the drafts that each draft sees.
    """
    batch_size, count, _ = visible.shape
    slots = context.token_to_kv_pool.translate(batch.out_cache_loc, group.layer_id).int()
    table, lens = listed(slots.view(batch_size, 1, count).expand(-1, count, -1), visible)
    return Keys(page_table=table.flatten(0, 1), lens=lens.flatten())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FA3Buffers:
    """Fixed tensors that graphs replay with."""

    keys: dict[KeyGroup, Keys]
    schedules: dict[FA3Schedule, torch.Tensor]
    max_num_tokens: int
    drafts: dict[tuple[KeyGroup, int], Keys] = field(default_factory=dict)
    """Keys of draft trees, by the number of drafts of a request: allocated by the first capture."""

    @classmethod
    def of(
        cls,
        groups: tuple[KeyGroup, ...],
        schedules: Iterable[FA3Schedule],
        context: BackendContext,
        max_bs: int,
        max_num_tokens: int,
    ) -> FA3Buffers:
        size = 4 * (-(-max_bs // 4) * 4) + 1  # see `FA3Schedule.compute`
        return cls(
            keys=PageTables.buffers(groups, max_bs, context),
            schedules={
                schedule: torch.zeros(size, dtype=torch.int32, device=context.device)
                for schedule in schedules
            },
            max_num_tokens=max_num_tokens,
        )

    def reserve_drafts(self, groups: Iterable[KeyGroup], drafts: int, device: torch.device) -> None:
        """Allocate tensors for trees of `drafts` tokens a request, unless an earlier capture
        did."""
        for group in groups:
            if (group, drafts) not in self.drafts:
                self.drafts[group, drafts] = Keys.zeros(self.max_num_tokens, drafts, device)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FA3Step:
    """A step. Its dictionaries are filled before its layers run."""

    tables: PageTables
    buffers: FA3Buffers | None
    schedules: dict[int, torch.Tensor] = field(default_factory=dict)
    """By layer id, which hashes faster than an `FA3Schedule`."""
    drafts: dict[KeyGroup, Keys] = field(default_factory=dict)
    """Keys of a draft tree: a row for each draft token."""

    def fill_drafts(
        self, batch: ForwardBatch, groups: Iterable[KeyGroup], context: BackendContext
    ) -> None:
        """The keys that each token of a draft tree sees among the drafts."""
        visible = batch.visible_drafts()
        for group in groups:
            keys = draft_keys(batch, visible, group, context)
            if self.buffers:
                keys = keys.copied_to(self.buffers.drafts[group, self.tables.max_seqlen_q])
            self.drafts[group] = keys

    def fill_schedules(
        self, kernels: FA3Kernels, schedules: Mapping[FA3Schedule, Sequence[int]]
    ) -> None:
        """schedules: the layers of each."""
        for schedule, layers in schedules.items():
            computed = schedule.compute(kernels, self.tables)
            if self.buffers:
                computed = self.buffers.schedules[schedule][: computed.shape[0]].copy_(computed)
            self.schedules.update(dict.fromkeys(layers, computed))
