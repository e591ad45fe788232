"""The places of each request's keys: the request table, or a table of another pool's pages."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from attnmux.core import AttnmuxError, BackendContext, LayerSpec
from attnmux.core.plugin import page_table
from attnmux.triton.attention.step import NO_STEP, TritonStep
from attnmux.triton.kernels.indices import fill_seen_pages
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher
from attnmux.triton.launches.operands import Slots

BLOCK = 256
"""Columns that are filled at a time. No kernel's block has more keys."""
PROGRAMS = 8
"""Programs that share the columns of a request."""
COLUMNS = 4
"""Rows of tables have a multiple of these columns, 16 bytes: each begins where the compiler assumes
that tensors do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotGroup:
    """Layers whose keys are at the same columns of one table."""

    is_cross: bool
    pool_group: int
    """See `KVPool.group_of`; 0 for the slots of the request table."""
    layer_id: int = field(compare=False)
    """One of the layers."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> SlotGroup:
        group = context.token_to_kv_pool.group_of(layer.layer_id)
        # Cross attention and the rest share the request table.
        return cls(
            is_cross=layer.is_cross_attention and group > 0,
            pool_group=group,
            layer_id=layer.layer_id,
        )

    @property
    def has_own_table(self) -> bool:
        """Whether the request table's slots are not the pool's."""
        return self.pool_group > 0

    def page_size(self, context: BackendContext) -> int:
        """The tokens of a column of the table that holds the places of the keys."""
        page_size = own_page_size(context)
        if self.has_own_table:
            return page_size
        return context.req_to_token_pool.columns_for(page_size)[1]


def own_page_size(context: BackendContext) -> int:
    """The page size of the tables of `SlotTables`."""
    # With an encoder, the decoder's keys may begin in the middle of a page.
    has_encoder = any(layer.is_cross_attention for layer in context.layers)
    return 1 if has_encoder else context.token_to_kv_pool.page_size


class SlotTables:
    """The request table, and a table for each group whose pool has slots of its own, made once and
    filled at every step."""

    def __init__(
        self,
        groups: frozenset[SlotGroup],
        context: BackendContext,
        launcher: Launcher | None = None,
    ) -> None:
        self._context = context
        self._launcher = launcher or Launcher()
        self._page_size = own_page_size(context)
        width = -(-context.max_context_len // (self._page_size * COLUMNS)) * COLUMNS
        self._own = {
            group: Slots(
                table=torch.zeros(
                    (context.max_batch_size, width), dtype=torch.int32, device=context.device
                ),
                rows=None,
                page_size=self._page_size,
                begins_with_encoder=False,
            )
            for group in groups
            if group.has_own_table
        }
        self._request_table: Slots | None = None
        """With the rows of the step that was filled last."""
        self._windows = {group: _widest(group, context) for group in self._own}
        self._bound: dict[Hashable, BoundKernel] = {}

    def fill(self, step: TritonStep) -> None:
        """Translate the request table for the groups that need it."""
        for group, slots in self._own.items():
            slot_map = self._context.token_to_kv_pool.slot_map(group.layer_id)
            if slot_map is None:
                self._translate(group, slots.table, step)
            else:
                self._look_up(group, slots.table, slot_map, step)
        table, tokens = self._context.req_to_token_pool.columns_for(self._page_size)
        self._request_table = Slots(
            table=table,
            rows=step.batch.req_pool_indices,
            page_size=tokens,
            begins_with_encoder=step.batch.encoder_lens is not None,
        )

    def _look_up(
        self, group: SlotGroup, own: torch.Tensor, slot_map: torch.Tensor, step: TritonStep
    ) -> None:
        """Fill the columns that the step's tokens see, in one launch."""
        batch = step.batch
        has_starts = batch.encoder_lens is not None and not group.is_cross
        variant = group, step.queries, step.lens_shift, has_starts
        bound = self._bound.get(variant)
        if bound is None:
            bound = self._bound[variant] = self._bind(group, own, slot_map, step)
        own_lens = step.queries is None and not group.is_cross
        bound(
            (batch.batch_size, PROGRAMS, 1),
            (
                batch.req_pool_indices,
                step.encoder_lens() if group.is_cross else step.lens,
                step.new_lens() if own_lens else None,
                batch.encoder_lens if has_starts else None,
            ),
        )

    def _bind(
        self, group: SlotGroup, own: torch.Tensor, slot_map: torch.Tensor, step: TritonStep
    ) -> BoundKernel:
        table = self._context.req_to_token_pool.req_to_token
        return BoundKernel(
            self._launcher,
            fill_seen_pages,
            {
                "table": table,
                "table_stride": table.stride(0),
                "slot_map": slot_map,
                "result": own,
                "result_stride": own.stride(0),
                "LENS_SHIFT": 0 if group.is_cross else step.lens_shift,
                "QUERIES": 0 if group.is_cross else step.queries or 0,
                "WINDOW": self._windows[group],
                "PAGE": self._page_size,
                "BLOCK": BLOCK,
            },
            tensors=("rows", "lens", "new_lens", "starts"),
            options={"num_warps": 4},
        )

    def _translate(self, group: SlotGroup, own: torch.Tensor, step: TritonStep) -> None:
        """Fill all columns with the pool's own method."""
        batch = step.batch
        pool, table = self._context.token_to_kv_pool, self._context.req_to_token_pool.req_to_token
        lens = batch.encoder_lens if group.is_cross else None
        pages = page_table(
            table,
            batch.req_pool_indices,
            step.key_lens() if lens is None else lens,
            page_size=self._page_size,
            kv_start=None if group.is_cross else batch.encoder_lens,
            max_len=self._context.max_context_len,
        )
        translate = pool.translate if self._page_size == 1 else pool.translate_pages
        own[: batch.batch_size, : pages.shape[1]].copy_(translate(pages, group.layer_id))

    def of(self, group: SlotGroup) -> Slots:
        """For the step that was filled last. Raises AttnmuxError if none was."""
        slots = self._own[group] if group.pool_group else self._request_table
        if slots is None:
            raise AttnmuxError(NO_STEP)
        return slots


def _widest(group: SlotGroup, context: BackendContext) -> int:
    """The widest window of the group's layers; -1 if one of them has none."""
    windows = [
        layer.sliding_window_size
        for layer in context.layers
        if layer.layer_id in context.token_to_kv_pool.layer_ids
        and SlotGroup.of(layer, context) == group
    ]
    return -1 if group.is_cross or -1 in windows else max(windows)
