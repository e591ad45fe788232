"""A plan in buffers that stay where they are, which is what captured graphs point at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnmux.cpu.flex_attention.keys import block_of_page, capacity_of, listed_of
from attnmux.cpu.flex_attention.plan import Plan, splits
from attnmux.cpu.flex_attention.spec import KernelInput, block_list, list_room
from attnmux.cpu.flex_attention.tiles import tile_count

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.context import BackendContext


class FixedPlan:
    """Room for the largest step of graphs. One step is in it at a time."""

    def __init__(
        self, context: BackendContext, layer_id: int, size: int, *, max_bs: int, max_num_tokens: int
    ) -> None:
        self.max_bs, self.max_num_tokens = max_bs, max_num_tokens
        block = block_of_page(context.token_to_kv_pool.page_size)
        columns = context.req_to_token_pool.req_to_token.shape[1]
        self.width = -(-columns // block)
        """Blocks a request, of the longest that may come."""
        self._listed = listed_of(context, block)
        self._capacity = capacity_of(context, layer_id, block)
        count, device = tile_count(max_num_tokens, max_bs, size), context.device
        self._tokens = torch.zeros((count, size), dtype=torch.int64, device=device)
        self._places = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._columns = torch.zeros(self._capacity, dtype=torch.int32, device=device)
        self._first = torch.zeros((count, size), dtype=torch.int32, device=device)
        self._end = torch.zeros_like(self._first)
        lists = 2 if splits(device) else 1
        self._counts = torch.zeros((lists, count, 1, 1), dtype=torch.int32, device=device)
        room = list_room(device, count, self._listed, self._capacity)
        self._lists = torch.zeros((lists, room), dtype=torch.int32, device=device)

    def has_room(self, max_bs: int, max_num_tokens: int) -> bool:
        """Whether it is large enough for steps of these sizes."""
        return max_bs <= self.max_bs and max_num_tokens <= self.max_num_tokens

    def holds(self, batch: ForwardBatch) -> bool:
        """Whether it has room for the step, and the step needs nothing that it has not."""
        is_plain = batch.multi_item is None and (
            batch.spec_info is None or batch.spec_info.custom_mask is None
        )
        has_graphs = batch.forward_mode.is_decode() or batch.forward_mode.is_target_verify()
        return is_plain and has_graphs and self.has_room(batch.batch_size, batch.num_tokens)

    def take(self, plan: Plan) -> Plan:
        """The plan, copied here."""
        given, count = plan.given, plan.given.first.shape[0]
        whole = num_whole = None
        if given.whole is not None and given.num_whole is not None:
            whole = self._list(1, given.whole)
            num_whole = self._counts[1, :count].copy_(given.num_whole)
        return replace(
            plan,
            tokens=self._tokens[:count].copy_(plan.tokens.view(count, -1)).flatten(),
            places=self._places[: plan.places.shape[0]].copy_(plan.places),
            given=KernelInput(
                columns=self._columns.copy_(given.columns),
                first=self._first[:count].copy_(given.first),
                end=self._end[:count].copy_(given.end),
                num_partial=self._counts[0, :count].copy_(given.num_partial),
                partial=self._list(0, given.partial),
                num_whole=num_whole,
                whole=whole,
                hidden=None,
                mask=None,
            ),
        )

    def _list(self, which: int, blocks: torch.Tensor) -> torch.Tensor:
        count, listed = blocks.shape[0], self._listed
        own = blocks.as_strided((count, listed), (listed, 1))
        self._lists[which, : count * listed].view(count, listed).copy_(own)
        return block_list(self._lists[which], count, listed, self._capacity)


def first_of(fixed: Iterable[FixedPlan], batch: ForwardBatch) -> FixedPlan | None:
    """The first that holds the step: the same at its capture and at every replay."""
    return next((each for each in fixed if each.holds(batch)), None)
