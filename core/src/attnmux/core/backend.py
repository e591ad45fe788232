"""The contract of an attention backend.

T new tokens and B requests of a step. `q [T, Hq, D]`, `k, v [T, Hkv, D]`, `out [T, Hq, Dv]`,
`lse [T, Hq]` float32. LSE is the natural logarithm of the softmax's denominator, sinks
included; a row without keys has LSE -inf and output 0. MLA is called absorbed: `q [T, Hq, rank]`,
`q_rope [T, Hq, rope]`, `k [T, 1, rank]`, `k_rope [T, 1, rope]`, `v` None, `out [T, Hq, rank]`.

Tokens of `q`, `k` and `v` may be any distance apart, as slices of one projection are; a token's
heads are contiguous, except that `q` and `q_rope` may be the parts of one [T, Hq, rank + rope].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, final

import torch

from attnmux.core.arguments import check_call, check_fields
from attnmux.core.batch import ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.debug import check_batch
from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import GraphUnsupported, InvalidInput

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.context import BackendContext
    from attnmux.core.layer import LayerSpec

NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


class AttentionBackend(ABC):
    """Attention for every layer of one model on one device.

    A step prepares its metadata once and then runs each layer. Preparation has two halves, so
    that it can straddle a device graph: `..._out_graph` runs before capture and before each replay,
    `..._in_graph` is captured and replayed. Eagerly both run. One instance has one step in flight.
    """

    def __init__(self, context: BackendContext, options: Mapping[str, object] = NO_OPTIONS) -> None:
        self.context = context
        self.options = options
        self._dtype = torch_dtype(context.request.dtype) if context.request.dtype else None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare an eager step. Raises InvalidInput for a malformed batch."""
        check_fields(batch)
        self.init_forward_metadata_out_graph(batch)
        self.init_forward_metadata_in_graph(batch)

    @abstractmethod
    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Host work, dynamic shapes, a library's `plan()`. It may synchronise."""

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Device operations of static shape: no synchronisation, and nothing allocated is kept."""

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """The backend that serves steps of that mode: itself, except for a composite."""
        return self

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers that graphs of steps up to this size point at.

        Each graph runner calls it before it captures. Captured graphs read earlier buffers, so a
        call that needs more room adds buffers and moves none. A larger step runs eagerly.
        Raises GraphUnsupported unless the backend overrides it.
        """
        raise GraphUnsupported(f"{type(self).__name__} cannot be captured in a device graph")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The `seq_lens` of a padding row in a graph."""
        return 1

    def save_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        k_rope: torch.Tensor | None = None,
    ) -> None:
        """Write the new tokens' K and V to the pool. A backend with a fused writer overrides it."""
        pool = self.context.token_to_kv_pool
        loc = batch.encoder_out_cache_loc if layer.is_cross_attention else batch.out_cache_loc
        if loc is None:
            raise InvalidInput(
                "encoder_out_cache_loc", came=None, expected="slots for the encoder's K and V"
            )
        if k_rope is not None:
            pool.set_mla_kv_buffer(layer, loc, k, k_rope, layer.k_scale)
        elif v is not None:
            pool.set_kv_buffer(layer, loc, k, v, layer.k_scale, layer.v_scale)
        else:
            raise InvalidInput("v", came=None, expected="V next to K, or k_rope for MLA")

    @final
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer: write K and V to the pool, then attend over the cache.

        With k None, K and V are in the pool already. With save_kv_cache False and k given, the keys
        are `k` and `v` themselves and there is no prefix. Returns `out`, newly allocated unless
        given; an IDLE step returns the result of queries
        without keys and touches nothing.
        Raises InvalidInput for shapes, dtypes or devices that do not fit the layer and the
        batch, before the pool is touched.
        """
        call = AttentionCall(q, k, v, layer, save_kv_cache, q_rope, k_rope, out, lse)
        check_call(call, batch, dtype=self._dtype)
        if batch.forward_mode is ForwardMode.IDLE:
            return call.empty_result()
        if self.context.debug:
            check_batch(self.context, batch)
        if k is not None and save_kv_cache:
            self.save_kv(k, v, layer, batch, k_rope=k_rope)
        attend = self.forward_decode if batch.forward_mode.is_decode() else self.forward_extend
        result = attend(call, batch)
        return result if out is None or result is out else out.copy_(result)

    @abstractmethod
    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        """One new token a request; K and V are in the pool.

        Returns `call.out`, or a tensor of the backend's own, which `forward` copies to `out`.
        Writes `call.lse` where given.
        """

    @abstractmethod
    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        """Many new tokens a request on top of a cached prefix; returns like `forward_decode`."""
