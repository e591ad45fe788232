"""Once a step: the work of a layer, cut into tiles of bounded size.

A tile holds queries of a few requests, each with a stretch of its request's keys: many short
requests together, or a block of a long request's queries with just the keys that they can see. Keys
hidden from the whole tile are never read.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnmux.core.plugin import cu_seqlens
from attnmux.cpu.spans import slots_of, spans_of, visibility

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnmux.core import BackendContext, ForwardBatch, LayerSpec
    from attnmux.cpu.spans import Spans, Visibility
    from attnmux.cpu.steps import KeyRule, StepLens


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
    """See `Tile`."""


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
    groups = [[tile] for tile in work] if context.request.deterministic else _groups(work, size)
    return Plan(
        tiles=tuple(_tile(group, size, slots) for group in groups),
        visibility=visible.to(context.device),
        keyless=torch.tensor(keyless, dtype=torch.int64, device=context.device),
    )


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
            first_key = first[token]
            if visible.mask is not None:  # a deep node of a tree may come before others
                first_key = min(first[token : last + 1])
            num_keys = end[last] - first_key
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
