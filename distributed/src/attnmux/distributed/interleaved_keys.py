"""The keys of a step's cached prefixes, gathered from the ranks that hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core import KVPool, LayerSpec
from attnmux.distributed.heads import HeadSplit
from attnmux.distributed.interleaving import Interleaving


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeysOfRanks:
    """Where the keys of one part of a step lie."""

    slots: torch.Tensor
    """[most] int64: this rank's, padded with 0 to the most that a rank holds."""
    order: torch.Tensor
    """[n] int64: the row of each key among the gathered rows, [size * most]."""

    @classmethod
    def of(cls, slots: torch.Tensor, interleaving: Interleaving) -> KeysOfRanks:
        """slots: [n] int64, the engine's. It waits for the device, to count each rank's keys."""
        owners = interleaving.owners(slots)
        is_of = owners == torch.arange(interleaving.size, device=slots.device).unsqueeze(1)
        counts = is_of.sum(1)
        most = int(counts.max())
        own = interleaving.local(slots[is_of[interleaving.rank]])
        within = is_of.cumsum(1).gather(0, owners.unsqueeze(0)).squeeze(0) - 1
        return cls(
            slots=torch.nn.functional.pad(own, (0, most - own.shape[0])),
            order=owners * most + within,
        )

    def gather(
        self, pool: KVPool, layer: LayerSpec, heads: HeadSplit, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K [n, Hkv, D] and V [n, Hkv, Dv] of this rank's heads, as the pool stores them, in
        `dtype`. In MLA, K is the latent row and V its first part. Every rank calls it."""
        k_buffer, v_buffer = pool.get_kv_buffer(layer.layer_id)
        read = pool.translate(self.slots, layer.layer_id)
        if layer.kind == "mla":
            rows = self._rows(k_buffer, read, heads).to(dtype)
            return rows, rows[..., : layer.v_head_dim]
        k, v = (self._rows(each, read, heads).to(dtype) for each in (k_buffer, v_buffer))
        return k, v

    def _rows(self, buffer: torch.Tensor, read: torch.Tensor, heads: HeadSplit) -> torch.Tensor:
        # As bytes: neither torch's indexing nor every transport knows 8-bit floats
        raw = buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer
        gathered = heads.swap_rows(raw.index_select(0, read))
        return gathered.flatten(0, 1).index_select(0, self.order).view(buffer.dtype)
