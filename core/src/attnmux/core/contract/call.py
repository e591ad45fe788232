"""One layer's attention call, as `AttentionBackend.forward` passes it to a backend."""

from __future__ import annotations

import msgspec
import torch

from attnmux.core.contract.layer import LayerSpec
from attnmux.core.facts.errors import InvalidInput


class AttentionCall(msgspec.Struct, frozen=True, eq=False):
    """The checked arguments of one layer's attention.

    A msgspec struct rather than a frozen dataclass: each layer of each step makes one, which takes
    0.2 us instead of 2.4 us.
    """

    q: torch.Tensor
    """[T, Hq, D]; for MLA [T, Hq, rank], for kind "dual_chunk" [T, Hq, 3 * D]."""
    k: torch.Tensor | None
    """[T, Hkv, D], for MLA [T, 1, rank]; None if K and V are already in the pool. Rows are the
    encoder's tokens in a cross attention layer."""
    v: torch.Tensor | None
    """[T, Hkv, Dv]; None for MLA."""
    layer: LayerSpec
    save_kv_cache: bool = True
    q_rope: torch.Tensor | None = None
    """[T, Hq, rope] of MLA; `q` and `q_rope` may be parts of one row."""
    k_rope: torch.Tensor | None = None
    """[T, 1, rope] of MLA."""
    out: torch.Tensor | None = None
    """[T, Hq, Dv]: the caller's tensor for the result."""
    lse: torch.Tensor | None = None
    """[T, Hq] float32, written if given."""

    @property
    def has_own_kv(self) -> bool:
        """Whether `k` and `v` themselves are all keys, without a prefix and without the pool."""
        return self.k is not None and not self.save_kv_cache

    def rotary_queries(self) -> torch.Tensor:
        """`q_rope`. Raises InvalidInput if it is missing."""
        if self.q_rope is None:
            raise InvalidInput("q_rope", got=None, expected="the rotary part [T, Hq, rope]")
        return self.q_rope

    def own_keys(self, second: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """K and `second`, which is V or K's rotary part, of a call that `has_own_kv`.

        Raises InvalidInput without one of them, and for another dtype than that of Q.
        """
        if self.k is None or second is None:
            raise self.layer.not_in_pool()
        self.check_keys_dtype(self.k, second)
        return self.k, second

    def check_keys_dtype(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Raises InvalidInput for the call's own K and V of another dtype than Q."""
        if k.dtype != self.q.dtype or v.dtype != self.q.dtype:
            expected = f"{self.q.dtype}, as q is"
            raise InvalidInput("k", got=f"{k.dtype} and {v.dtype}", expected=expected)

    def empty_result(self) -> torch.Tensor:
        """The result if no query sees a key: zeros, and an LSE of -inf or the layer's sinks."""
        layer = self.layer
        if self.lse is not None:
            self.lse.fill_(-torch.inf)
            if layer.sinks is not None:
                self.lse.copy_(layer.sinks)
        if self.out is not None:
            return self.out.zero_()
        return self.q.new_zeros((self.q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
