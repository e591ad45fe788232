"""How the heads of a layer are split over the ranks of a group, and the ranks' exchanges."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attnmux.core import InvalidInput, LayerSpec
from attnmux.distributed.ranks import RankGroup


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeadSplit:
    """Query heads are split over the ranks in order; KV heads too, or `kv_copies` ranks in
    succession hold the same ones, as all ranks do in MLA.

    Raises InvalidInput unless the copies divide the ranks.
    """

    group: RankGroup
    kv_copies: int = 1

    def __post_init__(self) -> None:
        if self.kv_copies < 1 or self.group.size % self.kv_copies:
            expected = f"a divisor of the group's {self.group.size} ranks"
            raise InvalidInput("kv_copies", got=self.kv_copies, expected=expected)

    @property
    def kv_is_shared(self) -> bool:
        """Whether all ranks hold the same KV heads."""
        return self.kv_copies == self.group.size

    def whole(self, layer: LayerSpec) -> LayerSpec:
        """The layer with the heads of all ranks. Its sinks are on rank 0 alone, since they count
        once. Every rank calls it."""
        kv_heads = layer.tp_k_head_num * self.group.size // self.kv_copies
        sinks = layer.sinks
        if sinks is not None:
            sinks = self.group.all_gather(sinks).flatten()
            sinks = sinks if self.group.rank == 0 else None
        return replace(
            layer,
            tp_q_head_num=layer.tp_q_head_num * self.group.size,
            tp_k_head_num=kv_heads,
            tp_v_head_num=kv_heads,
            sinks=sinks,
        )

    def gather_queries(self, q: torch.Tensor) -> torch.Tensor:
        """[T, all Hq, D] of this rank's [T, Hq, D]."""
        return self.group.all_gather(q).transpose(0, 1).flatten(1, 2)

    def gather_keys(self, k: torch.Tensor) -> torch.Tensor:
        """[T, all Hkv, D] of this rank's K or V [T, Hkv, D]; the same if the heads are
        shared."""
        if self.kv_is_shared:
            return k
        gathered = self.group.all_gather(k)[:: self.kv_copies]
        return gathered.transpose(0, 1).flatten(1, 2)

    def swap_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of all ranks with this rank's KV heads, [size, n, Hkv, D], of this rank's rows with
        all heads, [n, all Hkv, D]."""
        if self.kv_is_shared:
            return self.group.all_gather(rows)
        num_rows, _, dim = rows.shape
        by_heads = rows.view(num_rows, self.group.size // self.kv_copies, -1, dim).movedim(1, 0)
        return self.group.all_to_all(by_heads.repeat_interleave(self.kv_copies, dim=0))
