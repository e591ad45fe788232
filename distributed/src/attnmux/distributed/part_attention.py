"""Attention of a rank's tokens to one part of a step after another, merged by LSE."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from attnmux.core import AttentionBackend, LayerSpec, merge_into
from attnmux.distributed.chunk_gather import ChunkGather
from attnmux.distributed.kv_rows import KVRows, Stored
from attnmux.distributed.split_parts import Part, Visit, own_visit, parts_of

if TYPE_CHECKING:
    from attnmux.core import RequestTable
    from attnmux.distributed.zigzag import ZigzagStep

Pair = tuple[LayerSpec, LayerSpec]
"""Layers of `split_context`: for a chunk's tokens on themselves, and for other keys."""

Expand = Callable[[Stored], Stored]
"""K [n, H, D] and V [n, H, Dv] as a call takes them, of values as a pool stores them."""


class PartAttention:
    """Runs the parts of a prepared step on some backends, which are all alike.

    Each backend keeps one visit prepared for all layers; the last one prepares the visits that are
    left over in every layer again.
    """

    def __init__(
        self, backends: Sequence[AttentionBackend], *, chunks_at_once: int, part_tokens: int
    ) -> None:
        """chunks_at_once, part_tokens: see `parts_of`."""
        self._backends = tuple(backends)
        self._chunks_at_once = chunks_at_once
        self._part_tokens = part_tokens
        self._own: Visit | None = None
        self.parts: tuple[Part, ...] = ()
        """Those of the step, but for the rank's own chunks."""
        self._prepared: list[Visit | None] = [None] * len(backends)

    def prepare(self, step: ZigzagStep, table: RequestTable) -> None:
        self._own = own_visit(step) if step.num_tokens else None
        self.parts = parts_of(
            step, table, chunks_at_once=self._chunks_at_once, most_tokens=self._part_tokens
        )
        self._prepared = [None] * len(self._backends)

    def __call__(
        self,
        q: torch.Tensor,
        layers: Pair,
        own: torch.Tensor,
        gather: ChunkGather,
        kv: KVRows,
        expand: Expand,
        *,
        with_prefix: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, H, Dv] and LSE [T, H] of the rank's tokens, float32, without sinks.

        own: rows of their K and V, as `kv` makes them. gather: the rows of all ranks, on their way.
        """
        of_own, of_others = layers
        lse = q.new_empty((len(q), of_own.tp_q_head_num), dtype=torch.float32)
        out = q.new_empty((*lse.shape, of_own.v_head_dim), dtype=torch.float32)
        if self._own is not None:
            out.copy_(self._attend(self._own, of_own, q, expand(kv.split(own)), lse))
        for part in self.parts:
            if isinstance(part.keys, torch.Tensor) and part.is_prefix:
                if not with_prefix:
                    continue
                keys = expand(kv.read(part.keys))
            else:
                keys = expand(kv.split(gather.wait(part.chunks)[part.keys]))
            for visit in part.visits:
                seen = lse[visit.tokens]
                part_lse = torch.empty_like(seen)
                attended = self._attend(visit, of_others, q[visit.tokens], keys, part_lse)
                merge_into(out[visit.tokens], seen, attended, part_lse)
        return out, lse

    def _attend(
        self, visit: Visit, layer: LayerSpec, q: torch.Tensor, keys: Stored, lse: torch.Tensor
    ) -> torch.Tensor:
        place = min(visit.number, len(self._backends) - 1)
        backend = self._backends[place]
        if self._prepared[place] is not visit:
            # Not checked by `context.debug`: a part contradicts the request table
            backend.init_forward_metadata_out_graph(visit.batch)
            backend.init_forward_metadata_in_graph(visit.batch)
            self._prepared[place] = visit
        k, v = keys
        return backend.forward(q, k, v, layer, visit.batch, save_kv_cache=False, lse=lse)


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Add a key without a value to `out` [T, H, D] and `lse` [T, H], both float32, in place.

    sinks: [H] float32, its logit for each head.
    """
    out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))
    torch.logaddexp(lse, sinks.expand_as(lse), out=lse)
