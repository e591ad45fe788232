"""Once a step: the work of a layer, cut into tiles of bounded size.

A tile is a few requests' queries against a stretch of each one's keys: many short requests
together, or a block of a long one's queries with just the keys that they can see. What is
hidden from a whole tile is never read.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnmux.core.indices import cu_seqlens, extend_positions, kv_indices
from attnmux.cpu.torch_native.visibility import Visibility, visibility

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnmux.core.batch import ForwardBatch
    from attnmux.core.context import BackendContext
    from attnmux.core.layer import LayerSpec
    from attnmux.cpu.steps import KeyRule, StepLens


@dataclass(frozen=True, kw_only=True, slots=True)
class TileSize:
    """The largest tile of a layer."""

    queries: int
    """Queries of one request."""
    keys: int
    """Keys of all requests together that are gathered at once."""
    logits: int
    """Queries times keys that are multiplied at once, for one head."""

    @classmethod
    def of(cls, layer: LayerSpec, device: torch.device) -> TileSize:
        """A tile for so many CPU threads; any other device gets one for sixteen.

        A larger tile costs fewer launches, a smaller one stays in the caches. The figures are
        the best of powers of two at 2 threads (32 MiB of L3) and 16 threads (300 MiB).
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

    Shorter stretches are padded by repeating their last query or key: a repeated query computes
    its result twice, a repeated key is hidden.
    """

    tokens: slice | torch.Tensor
    """R * Tq rows of q and out."""
    num_requests: int
    slots: torch.Tensor
    """[R, S] int: where the keys are."""
    first_key: torch.Tensor
    """[R, 1] int64: position of the first key."""
    step: int
    """Keys a request to gather at once."""
    seen_by_all: tuple[int, int]
    """A range of the S keys that every query sees all of; nothing else about them is known."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """One step of the layers that share a rule, a pool and a tile size."""

    tiles: tuple[Tile, ...]
    visibility: Visibility
    keyless: torch.Tensor
    """Rows of q without keys, padding included: their output is known."""


class _Work(NamedTuple):
    """Consecutive queries of one request, and the keys that any of them sees."""

    num_queries: int
    num_keys: int
    token: int
    """Row of the first query in q."""
    first_key: int
    """Position of the first key."""
    place: int
    """Where that key's slot is among all slots of the step."""
    seen_by_all: tuple[int, int]
    """As on `Tile`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Spans:
    """The keys that any query of a request sees, for each request, on the host."""

    start: torch.Tensor
    """[B] int32: position of the first key."""
    indptr: torch.Tensor
    """[B + 1] int32: where the request's keys begin among all keys of the step."""


def make_plan(
    rule: KeyRule,
    size: TileSize,
    layer: LayerSpec,
    batch: ForwardBatch,
    lens: StepLens,
    context: BackendContext,
) -> Plan:
    """Cut the step into tiles, for all layers that share the rule, the size and a pool."""
    visible = visibility(rule, batch, lens)
    qo_indptr = cu_seqlens(lens.new)
    spans = _spans(visible, qo_indptr)
    slots = _slots(spans, rule, layer, batch, lens, context)
    work, keyless = _work(visible, spans, qo_indptr, size)
    keyless += range(visible.first.numel(), batch.num_tokens)
    # What a tile's products round depends on its shape, so each request gets its own.
    groups = [[one] for one in work] if context.request.deterministic else _groups(work, size)
    return Plan(
        tiles=tuple(_tile(group, size, slots) for group in groups),
        visibility=visible.to(context.device),
        keyless=torch.tensor(keyless, dtype=torch.int64, device=context.device),
    )


def _spans(visible: Visibility, qo_indptr: torch.Tensor) -> _Spans:
    start = torch.zeros_like(qo_indptr[1:])
    lens = torch.zeros_like(start)
    has_queries = qo_indptr.diff() > 0
    first = visible.first[qo_indptr[:-1][has_queries]]
    end = visible.end[qo_indptr[1:][has_queries] - 1]
    start[has_queries] = first.int()
    lens[has_queries] = (end - first).clamp_(min=0).int()
    return _Spans(start=start, indptr=cu_seqlens(lens))


def _slots(
    spans: _Spans,
    rule: KeyRule,
    layer: LayerSpec,
    batch: ForwardBatch,
    lens: StepLens,
    context: BackendContext,
) -> torch.Tensor:
    """Where the keys of all spans are, one request after another: slots, or rows of k."""
    total = int(spans.indptr[-1])
    if rule.in_call:
        rows = cu_seqlens(lens.encoder if rule.is_cross else lens.new)[:-1] + spans.start
        return extend_positions(rows, spans.indptr.diff(), total=total).to(context.device)
    columns = spans.start if rule.is_cross else spans.start + lens.encoder
    slots = kv_indices(
        context.req_to_token_pool.req_to_token,
        batch.req_pool_indices,
        spans.indptr.to(context.device),
        kv_start=columns.to(context.device),
        total=total,
    )
    return context.token_to_kv_pool.translate(slots, layer.layer_id)


def _work(
    visible: Visibility, spans: _Spans, qo_indptr: torch.Tensor, size: TileSize
) -> tuple[list[_Work], list[int]]:
    """All queries but those without keys, and these queries' rows."""
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
            # The range of a later query neither begins nor ends before an earlier one's.
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
    """Work of like size, as much as fits a tile. What does not fit stands alone."""
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
    """[R * max(lens)] int64: ranges, drawn out to one length by repeating their last value."""
    steps = torch.arange(max(lens)).unsqueeze(0)
    last = torch.tensor(lens).unsqueeze(1) - 1
    return (torch.tensor(starts).unsqueeze(1) + torch.minimum(steps, last)).view(-1)


def _slice_or_index(rows: torch.Tensor, device: torch.device) -> slice | torch.Tensor:
    """Rows as a slice where they follow each other, since that is a view and copies nothing."""
    start, count = int(rows[0]), rows.numel()
    if torch.equal(rows, torch.arange(start, start + count)):
        return slice(start, start + count)
    return rows.to(device)
