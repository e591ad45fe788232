"""Where the keys of each request are: in the request table or in one of another pool's pages."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from attnmux.core.backend import BackendContext
from attnmux.core.batch import ForwardBatch
from attnmux.core.indices import page_table
from attnmux.core.layer import LayerSpec
from attnmux.triton.step import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotGroup:
    """Layers whose keys are at the same columns of one table."""

    is_cross: bool
    pool_group: int
    """As `KVPool.group_of`."""
    layer_id: int = field(compare=False)
    """One of the layers."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> SlotGroup:
        group = context.token_to_kv_pool.group_of(layer.layer_id)
        # The request table serves cross attention and the rest alike.
        return cls(
            is_cross=layer.is_cross_attention and group > 0,
            pool_group=group,
            layer_id=layer.layer_id,
        )

    def page_size(self, context: BackendContext) -> int:
        """Of the table that says where the keys are."""
        return own_page_size(context) if self.pool_group else 1


def own_page_size(context: BackendContext) -> int:
    """Of the tables of groups that the request table does not serve."""
    # With an encoder, the decoder's keys begin in the middle of a page.
    has_encoder = any(layer.is_cross_attention for layer in context.layers)
    return 1 if has_encoder else context.token_to_kv_pool.page_size


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slots:
    """A table of slots or pages, and which of its rows each request has."""

    table: torch.Tensor
    """[R, W] int32."""
    rows: torch.Tensor | None
    """[at least B] int64; None: each request's is that of its place in the batch."""
    page_size: int
    begins_with_encoder: bool
    """The decoder's keys begin behind the encoder's; else in column 0."""


class SlotTables:
    """The tables of a context. Groups that the request table does not serve get one of their own,
    made once and filled at every step."""

    def __init__(self, groups: frozenset[SlotGroup], context: BackendContext) -> None:
        self._context = context
        self._page_size = own_page_size(context)
        width = -(-context.max_context_len // self._page_size)
        self._own = {
            group: torch.zeros(
                (context.max_batch_size, width), dtype=torch.int32, device=context.device
            )
            for group in groups
            if group.pool_group
        }

    def fill(self, step: Step) -> None:
        """Translate the request table for the groups that need it."""
        batch = step.batch
        pool, table = self._context.token_to_kv_pool, self._context.req_to_token_pool.req_to_token
        for group, own in self._own.items():
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
            own[: batch.batch_size].copy_(translate(pages, group.layer_id))

    def of(self, group: SlotGroup, batch: ForwardBatch) -> Slots:
        own = self._own.get(group)
        if own is not None:
            return Slots(
                table=own,
                rows=None,
                page_size=self._page_size,
                begins_with_encoder=False,
            )
        return Slots(
            table=self._context.req_to_token_pool.req_to_token,
            rows=batch.req_pool_indices,
            page_size=1,
            begins_with_encoder=batch.encoder_lens is not None,
        )
