"""The parts of a step for `npu_ring_mla`: which queries see which keys in one call.

The operator wants at least one query of each request, and at least as many keys. A request with
fewer keys in a part is cut in pieces of as many queries as it has keys, which count as requests;
its keys are repeated for each piece. One without keys or queries is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from attnmux.core import ForwardBatch, RequestTable
from attnmux.core.plugin import cu_seqlens, kv_indices

MOST_PARTS = 8
"""Parts of a prefix, at most: the operator rounds the result so far to bfloat16 after each."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RingPart:
    """Queries of a step, and keys that lie one request after the other."""

    seqlen: torch.Tensor
    """[2, pieces] int32 on the host: queries and keys of each piece."""
    rows: torch.Tensor | None
    """[n] int64: the queries' rows in the step. None: all of them, in order."""
    places: torch.Tensor | None
    """[m] int64: the keys' places among those of all requests. None: all of them, in order."""
    lens: tuple[int, ...]
    """Keys of each request."""
    starts: tuple[int, ...]
    """Each request's first key, counted from its first in the cache."""

    @classmethod
    def of(
        cls,
        new: Sequence[int],
        starts: Sequence[int],
        lens: Sequence[int],
        device: torch.device,
    ) -> RingPart | None:
        """None if no query sees a key."""
        queries, spans, rows = list[int](), list[tuple[int, int]](), list[torch.Tensor]()
        row = place = 0
        for count, length in zip(new, lens, strict=True):
            if count and length:
                pieces = range(count, 0, -length)
                queries += [min(left, length) for left in pieces]
                spans += [(place, place + length)] * len(pieces)
                rows.append(torch.arange(row, row + count))
            row, place = row + count, place + length
        if not spans:
            return None
        keys = [last - first for first, last in spans]
        has_all = len(spans) == sum(map(bool, lens)) and sum(keys) == place
        places = None if has_all else torch.cat([torch.arange(*span) for span in spans])
        return cls(
            seqlen=torch.tensor([queries, keys], dtype=torch.int32),
            rows=None if sum(queries) == row else torch.cat(rows).to(device),
            places=None if places is None else places.to(device),
            lens=tuple(lens),
            starts=tuple(starts),
        )

    def slots(self, batch: ForwardBatch, table: RequestTable) -> torch.Tensor:
        """[m] int64: the keys' slots in the request table. Encoder tokens come before others."""
        indices = batch.req_pool_indices
        of_part = torch.tensor([self.starts, self.lens], dtype=torch.int32, device=indices.device)
        slots = kv_indices(
            table,
            indices,
            cu_seqlens(of_part[1]),
            kv_start=of_part[0],
            total=sum(self.lens),
        ).long()
        return slots if self.places is None else slots[self.places]


def prefix_parts(
    new: Sequence[int],
    starts: Sequence[int],
    lens: Sequence[int],
    *,
    most: int,
    device: torch.device,
) -> Iterator[RingPart]:
    """The cached prefixes in parts of up to `most` keys, or else in `MOST_PARTS` of more.

    starts, lens: each request's first key in the cache, and its keys.
    """
    longest = max(lens, default=0)
    width = max(most // max(sum(map(bool, lens)), 1), -(-longest // MOST_PARTS), 1)
    for first in range(0, longest, width):
        part = RingPart.of(
            new,
            [start + first for start in starts],
            [min(max(length - first, 0), width) for length in lens],
            device,
        )
        if part is not None:
            yield part
