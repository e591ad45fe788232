"""Once a step: which keys each query sees, and the work of a layer cut into tiles of bounded size.

A tile holds queries of a few requests, each with a stretch of its request's keys: many short
requests together, or a block of a long request's queries with just the keys that they can see. Keys
hidden from the whole tile are never read.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnmux.core import cu_seqlens, extend_positions, kv_indices
from attnmux.cpu.steps import mask_starts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnmux.core import BackendContext, ForwardBatch, LayerSpec
    from attnmux.cpu.steps import KeyRule, StepLens


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Visibility:
    """The keys that each query sees: a range, minus those that an item or a mask hides.

    Of the step's T rows, the first T' <= T are tokens of requests; the rest is padding.
    """

    first: torch.Tensor
    """[T'] int64: the first key in range."""
    end: torch.Tensor
    """[T'] int64: one past the last key. Neither it nor `first` falls within a request."""
    item: tuple[torch.Tensor, torch.Tensor] | None
    """Keys from the first to the second [T'] int64 are hidden: the end of the shared prefix, the
    start of the query's own item."""
    mask: tuple[torch.Tensor, torch.Tensor] | None
    """The flat custom mask, and [T'] int64: the place of the query's key 0 in it."""

    def to(self, device: torch.device) -> Visibility:
        """A copy on a device; the flat mask is there already."""
        item, mask = self.item, self.mask
        return Visibility(
            first=self.first.to(device),
            end=self.end.to(device),
            item=None if item is None else (item[0].to(device), item[1].to(device)),
            mask=None if mask is None else (mask[0], mask[1].to(device)),
        )

    @property
    def is_range(self) -> bool:
        """Whether no key in range is hidden."""
        return self.item is None and self.mask is None

    def hidden(self, tokens: slice | torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which keys the queries do not see, [R, Tq, S] bool.

        tokens: R * Tq rows of the step, request by request. keys: positions, [R, S] int64.
        """
        num_requests = keys.shape[0]

        def of_tokens(values: torch.Tensor) -> torch.Tensor:
            return values[tokens].view(num_requests, -1, 1)

        keys = keys.unsqueeze(1)
        hidden = (keys < of_tokens(self.first)) | (keys >= of_tokens(self.end))
        if self.item is not None:
            prefix_end, item_start = self.item
            hidden |= (keys >= of_tokens(prefix_end)) & (keys < of_tokens(item_start))
        if self.mask is not None:
            keep, row_start = self.mask
            # Keys past the request's last are hidden already, but may lie outside the mask.
            places = (of_tokens(row_start) + keys).clamp_(max=keep.numel() - 1)
            hidden |= ~keep[places]
        return hidden


def visibility(rule: KeyRule, batch: ForwardBatch, lens: StepLens) -> Visibility:
    """The keys that each query sees under a rule. All of it is on the host, except the flat mask.

    Raises InvalidInput for a custom mask whose size is not that of the step.
    """
    new = lens.new
    cached = torch.zeros_like(lens.cached) if rule.in_call else lens.cached
    num_tokens = int(new.sum())
    num_keys = lens.encoder if rule.is_cross else cached + new

    def of_requests(values: torch.Tensor) -> torch.Tensor:
        return values.long().repeat_interleave(new, output_size=num_tokens)

    position, widths = extend_positions(cached, new, total=num_tokens), of_requests(num_keys)
    keep = None if batch.spec_info is None else batch.spec_info.custom_mask
    first, end = rule.bounds(position, widths, masked=keep is not None)
    if rule.is_cross:
        return Visibility(first=first, end=end, item=None, mask=None)
    item = mask = None
    if batch.multi_item is not None:
        in_item = batch.multi_item.token_pos_in_items.cpu()[:num_tokens]
        item = of_requests(batch.multi_item.prefix_lens.cpu()), position - in_item
    if keep is not None:
        row = of_requests(mask_starts(keep, new, num_keys))
        mask = keep, row + (position - of_requests(cached)) * widths
    return Visibility(first=first, end=end, item=item, mask=mask)


@dataclass(frozen=True, kw_only=True, slots=True)
class TileSize:
    """The largest tile of a layer."""

    queries: int
    """Queries of one request."""
    keys: int
    """Keys gathered at once, of all requests together."""
    logits: int
    """Logits computed at once for one head: queries times keys."""

    @classmethod
    def of(cls, layer: LayerSpec, device: torch.device) -> TileSize:
        """The size for this number of CPU threads; other devices get that for sixteen.

        A larger tile costs fewer launches, a smaller one stays in the caches. The figures are the
        fastest powers of two with 2 threads (32 MiB of L3) and 16 threads (300 MiB).
        """
        threads = min(torch.get_num_threads(), 16) if device.type == "cpu" else 16
        queries = max(1, min(128, 4096 // layer.tp_q_head_num))
        row = layer.tp_k_head_num * max(layer.qk_head_dim, layer.v_head_dim)
        return cls(
            queries=queries,
            keys=max(64, threads * 2**21 // row),
            logits=max(64 * queries, threads * 2**19 // layer.tp_q_head_num),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tile:
    """R stretches of queries, each with its own stretch of keys.

    Shorter stretches are padded with their last query or key: the result of a repeated query is
    computed twice, a repeated key is hidden.
    """

    tokens: slice | torch.Tensor
    """R * Tq rows of q and out."""
    num_requests: int
    slots: torch.Tensor
    """[R, S] int: the keys' slots, or their rows in the call's k."""
    first_key: torch.Tensor
    """[R, 1] int64: the position of the first key."""
    step: int
    """Keys of each request that are gathered at once."""
    seen_by_all: tuple[int, int]
    """A range of the S keys that every query sees; whether it sees the others is not known."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """A step of the layers that share a rule, a tile size and a group of the pool."""

    tiles: tuple[Tile, ...]
    visibility: Visibility
    keyless: torch.Tensor
    """Rows of q that see no key, padding included."""


class _Work(NamedTuple):
    """Consecutive queries of one request, and the stretch of keys that they see."""

    num_queries: int
    num_keys: int
    token: int
    """The first query's row in q."""
    first_key: int
    """The first key's position."""
    place: int
    """The first key's place among the step's slots."""
    seen_by_all: tuple[int, int]
    """As on `Tile`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Spans:
    """For each request, the stretch of keys that its queries see. On the host."""

    start: torch.Tensor
    """[B] int32: the position of the first key."""
    indptr: torch.Tensor
    """[B + 1] int32: where each request's keys begin among the step's slots."""


def make_plan(
    rule: KeyRule,
    size: TileSize,
    layer: LayerSpec,
    batch: ForwardBatch,
    lens: StepLens,
    context: BackendContext,
) -> Plan:
    """Cut the step into tiles, for all layers that share the rule, the size and the group."""
    visible = visibility(rule, batch, lens)
    qo_indptr = cu_seqlens(lens.new)
    spans = spans_of(visible, qo_indptr)
    slots = slots_of(spans, rule, layer, batch, lens, context)
    work, keyless = _work(visible, spans, qo_indptr, size)
    keyless += range(visible.first.numel(), batch.num_tokens)
    # How products are rounded depends on the tile's shape, so no two requests share a tile.
    groups = [[one] for one in work] if context.request.deterministic else _groups(work, size)
    return Plan(
        tiles=tuple(_tile(group, size, slots) for group in groups),
        visibility=visible.to(context.device),
        keyless=torch.tensor(keyless, dtype=torch.int64, device=context.device),
    )


def spans_of(visible: Visibility, qo_indptr: torch.Tensor) -> Spans:
    start = torch.zeros_like(qo_indptr[1:])
    lens = torch.zeros_like(start)
    has_queries = qo_indptr.diff() > 0
    first = visible.first[qo_indptr[:-1][has_queries]]
    end = visible.end[qo_indptr[1:][has_queries] - 1]
    start[has_queries] = first.int()
    lens[has_queries] = (end - first).clamp_(min=0).int()
    return Spans(start=start, indptr=cu_seqlens(lens))


def slots_of(
    spans: Spans,
    rule: KeyRule,
    layer: LayerSpec,
    batch: ForwardBatch,
    lens: StepLens,
    context: BackendContext,
) -> torch.Tensor:
    """The slots, or the rows of the call's k, of all spans' keys, one request after another."""
    total = int(spans.indptr[-1])
    if rule.in_call:
        rows = cu_seqlens(lens.encoder if rule.is_cross else lens.new)[:-1] + spans.start
        return extend_positions(rows, spans.indptr.diff(), total=total).to(context.device)
    columns = spans.start if rule.is_cross else spans.start + lens.encoder
    slots = kv_indices(
        context.req_to_token_pool,
        batch.req_pool_indices,
        spans.indptr.to(context.device),
        kv_start=columns.to(context.device),
        total=total,
    )
    return context.token_to_kv_pool.translate(slots, layer.layer_id)


def _work(
    visible: Visibility, spans: Spans, qo_indptr: torch.Tensor, size: TileSize
) -> tuple[list[_Work], list[int]]:
    """The work of all queries that see keys, and the rows of those that see none."""
    first, end = visible.first.tolist(), visible.end.tolist()
    places = (spans.indptr[:-1] - spans.start).tolist()
    work: list[_Work] = []
    keyless: list[int] = []
    for place, (start, stop) in zip(places, itertools.pairwise(qo_indptr.tolist()), strict=True):
        for token in range(start, stop, size.queries):
            last = min(token + size.queries, stop) - 1
            first_key, num_keys = first[token], end[last] - first[token]
            if num_keys <= 0:
                keyless += range(token, last + 1)
                continue
            # No query's range begins or ends before that of an earlier query.
            seen_by_all = (first[last] - first_key, end[token] - first_key)
            work.append(
                _Work(
                    num_queries=last + 1 - token,
                    num_keys=num_keys,
                    token=token,
                    first_key=first_key,
                    place=place + first_key,
                    seen_by_all=seen_by_all if visible.is_range else (0, 0),
                )
            )
    return work, keyless


def _groups(work: list[_Work], size: TileSize) -> Iterator[list[_Work]]:
    """Groups of work of similar size that fit a tile. Larger work is a group of its own."""
    group: list[_Work] = []
    most_keys = 0
    for item in sorted(work, key=lambda item: (item.num_queries, item.num_keys)):
        keys_with_item = max(most_keys, item.num_keys) * (len(group) + 1)
        if group and (
            keys_with_item > size.keys or keys_with_item * item.num_queries > size.logits
        ):
            yield group
            group, most_keys = [], 0
        group.append(item)
        most_keys = max(most_keys, item.num_keys)
    if group:
        yield group


def _tile(group: list[_Work], size: TileSize, slots: torch.Tensor) -> Tile:
    num_queries = max(work.num_queries for work in group)
    num_keys = max(work.num_keys for work in group)
    room = min(size.keys, size.logits // num_queries) // len(group)
    num_steps = -(-num_keys // max(room, 1))
    places = _padded([work.place for work in group], [work.num_keys for work in group])
    tokens = _padded([work.token for work in group], [work.num_queries for work in group])
    seen_from, seen_to = zip(*(work.seen_by_all for work in group), strict=True)
    return Tile(
        tokens=_slice_or_index(tokens, slots.device),
        num_requests=len(group),
        slots=slots[_slice_or_index(places, slots.device)].view(len(group), -1),
        first_key=torch.tensor([[work.first_key] for work in group], device=slots.device),
        step=-(-num_keys // num_steps),
        seen_by_all=(max(seen_from), min(seen_to)),
    )


def _padded(starts: list[int], lens: list[int]) -> torch.Tensor:
    """[R * max(lens)] int64: ranges, padded to one length with their last value."""
    steps = torch.arange(max(lens)).unsqueeze(0)
    last = torch.tensor(lens).unsqueeze(1) - 1
    return (torch.tensor(starts).unsqueeze(1) + torch.minimum(steps, last)).view(-1)


def _slice_or_index(rows: torch.Tensor, device: torch.device) -> slice | torch.Tensor:
    """Consecutive rows as a slice, which indexes without a copy; others as a tensor."""
    start, count = int(rows[0]), rows.numel()
    if torch.equal(rows, torch.arange(start, start + count)):
        return slice(start, start + count)
    return rows.to(device)
