"""One layer's attention call: what `AttentionBackend.forward` hands to a backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch

if TYPE_CHECKING:
    from attnmux.core.layer import LayerSpec


class AttentionCall(msgspec.Struct, frozen=True, eq=False):
    """The checked arguments of one layer's attention.

    A msgspec struct rather than a frozen dataclass: a model makes one for every layer of every
    step, and a struct is made in 0.2 us where a dataclass takes 2.4 us.
    """

    q: torch.Tensor
    """[T, Hq, D]; for MLA [T, Hq, rank], for kind "dual_chunk" [T, Hq, 3 * D]."""
    k: torch.Tensor | None
    """[T, Hkv, D], for MLA [T, 1, rank]; None where K and V are in the pool already. In a cross
    attention layer the rows are the encoder's tokens."""
    v: torch.Tensor | None
    """[T, Hkv, Dv]; None for MLA."""
    layer: LayerSpec
    save_kv_cache: bool = True
    q_rope: torch.Tensor | None = None
    """[T, Hq, rope] of MLA. It may be the end of the row whose beginning is `q`."""
    k_rope: torch.Tensor | None = None
    """[T, 1, rope] of MLA."""
    out: torch.Tensor | None = None
    """[T, Hq, Dv]: where the caller wants the result."""
    lse: torch.Tensor | None = None
    """[T, Hq] float32, written where given."""

    @property
    def has_own_kv(self) -> bool:
        """Whether the keys are `k` and `v` themselves: they are not in the pool, and there is no
        prefix."""
        return self.k is not None and not self.save_kv_cache

    def empty_result(self) -> torch.Tensor:
        """The result where no query sees a key: zeros, and an LSE of -inf or the layer's sinks."""
        layer = self.layer
        if self.lse is not None:
            self.lse.fill_(-torch.inf)
            if layer.sinks is not None:
                self.lse.copy_(layer.sinks)
        if self.out is not None:
            return self.out.zero_()
        return self.q.new_zeros((self.q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
