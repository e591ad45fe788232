"""Attention to blocks of keys that an indexer picked for each token and head, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from attnmux.core.call import AttentionCall
    from attnmux.core.kv.pool import KVPool

GATHERED_VALUES = 2**22
"""Values of K that are gathered at once: 16 MiB of float32."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PickedBlocks:
    """The keys of a step's T tokens."""

    picks: torch.Tensor
    """[T, Hp, topk] int32, as `ForwardBatch.topk_indices`."""
    size: int
    """Keys of a block."""
    table: torch.Tensor
    """[rows, max_context] int32, the request table."""
    rows: torch.Tensor
    """[T] int64: each token's row of it."""
    positions: torch.Tensor
    """[T] int64: each token's place. It sees no later key."""


class AttendsToBlocks(Protocol):
    """Attention of one layer to picked blocks in the pool."""

    def __call__(self, call: AttentionCall, picked: PickedBlocks) -> torch.Tensor:
        """Return `call.out`, or another [T, Hq, Dv]; write `call.lse` if given.

        Does not synchronise; shapes are static.
        """


class PlainBlocks:
    """On any device, in float32, a few tokens at a time."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def __call__(self, call: AttentionCall, picked: PickedBlocks) -> torch.Tensor:
        layer, q = call.layer, call.q.detach()
        keys, values = self._pool.get_kv_buffer(layer.layer_id)
        k_scale, v_scale = self._pool.read_scales(layer.k_scale, layer.v_scale)
        heads, topk = picked.picks.shape[1:]
        groups = q.view(len(q), heads, -1, q.shape[-1])
        # The KV head of each head of the picks
        of_head = torch.arange(heads, device=q.device) * layer.tp_k_head_num // heads
        out = call.out
        if out is None:
            out = q.new_empty((len(q), layer.tp_q_head_num, layer.v_head_dim))
        values_a_token = heads * topk * picked.size * layer.qk_head_dim
        at_once = max(1, GATHERED_VALUES // max(1, values_a_token))
        for start in range(0, len(q), at_once):
            some = slice(start, start + at_once)
            slots, hidden = self._slots(layer.layer_id, picked, some)
            k, v = (
                _gathered(each, slots, of_head.view(1, -1, 1), hidden) for each in (keys, values)
            )
            logits = torch.einsum("tpgd,tpkd->tpgk", groups[some].float(), k)
            logits = logits * (layer.scaling * k_scale)
            logits = logits.masked_fill(hidden.unsqueeze(2), -torch.inf)
            lse = logits.logsumexp(-1)
            weights = torch.exp(logits - lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1))
            found = torch.einsum("tpgk,tpkd->tpgd", weights, v) * v_scale
            out[some] = found.flatten(1, 2).to(out.dtype)
            if call.lse is not None:
                call.lse[some] = lse.flatten(1)
        return out

    def _slots(
        self, layer_id: int, picked: PickedBlocks, some: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots [t, Hp, topk * size] of the layer, and whether each is no key of the token."""
        picks = picked.picks[some].long().unsqueeze(-1)
        within = torch.arange(picked.size, device=picks.device)
        places = (picks * picked.size + within).flatten(2)
        # A block that is no pick is at a place below 0
        hidden = (places < 0) | (places > picked.positions[some].view(-1, 1, 1))
        rows = picked.rows[some].view(-1, 1, 1)
        slots = picked.table[rows, places.masked_fill(hidden, 0)]
        return self._pool.translate(slots.long(), layer_id).long(), hidden


def _gathered(
    cache: torch.Tensor, slots: torch.Tensor, heads: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """[t, Hp, n, D] float32 of cache [slots, Hkv, D]; 0 where hidden, since that may be NaN."""
    # torch gathers bytes on every device, 8-bit floats not on all
    raw = cache.detach().view(torch.uint8) if cache.itemsize == 1 else cache.detach()
    rows = raw[slots, heads].view(cache.dtype).float()
    return rows.masked_fill(hidden.unsqueeze(-1), 0)
