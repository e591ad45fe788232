"""The contract: what an attention backend is given and what it answers to.

T tokens and B requests of a step. `q [T, Hq, D]`, `k, v [T, Hkv, D]`, `out [T, Hq, Dv]`,
`lse [T, Hq]` float32. LSE is the natural logarithm of the softmax's denominator, sinks
included; a row without keys has LSE -inf and output 0. MLA is called absorbed: `q [T, Hq, rank]`,
`q_rope [T, Hq, rope]`, `k [T, 1, rank]`, `k_rope [T, 1, rope]`, `v` None, `out [T, Hq, rank]`.
`q` and `q_rope` may be the parts of one tensor [T, Hq, rank + rope]: kernels that take a row of
both then copy nothing.

Tokens of `q`, `k` and `v` may be any distance apart, as slices of one projection are; the heads of
a token lie together, those of such parts rank + rope apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, final

import torch

from attnmux.core.arguments import check_call, check_fields
from attnmux.core.batch import ForwardMode
from attnmux.core.debug import check_batch
from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import GraphUnsupported, InvalidInput
from attnmux.core.workspace import Workspace

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.choosing.platform import Platform
    from attnmux.core.choosing.request import Request
    from attnmux.core.kv import KVPool, ReqToTokenPool
    from attnmux.core.layer import LayerSpec

NO_OPTIONS: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BackendContext:
    """Everything that a backend may touch. An engine builds it once."""

    request: Request
    """What was decided: page size and KV dtype are set."""
    platform: Platform
    device: torch.device
    layers: tuple[LayerSpec, ...]
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KVPool
    workspace: Workspace
    max_batch_size: int
    max_context_len: int
    debug: bool = False
    """Run the checks that cost a device synchronisation."""
    _layer_by_id: Mapping[int, LayerSpec] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        by_id = {layer.layer_id: layer for layer in self.layers}
        if len(by_id) != len(self.layers):
            ids = [layer.layer_id for layer in self.layers]
            raise InvalidInput("layers", came=f"ids {ids}", expected="an id of its own for each")
        object.__setattr__(self, "_layer_by_id", by_id)

    def layer(self, layer_id: int) -> LayerSpec:
        """The layer of that id. Raises InvalidInput for an unknown one."""
        try:
            return self._layer_by_id[layer_id]
        except KeyError:
            raise InvalidInput(
                "layer_id", came=layer_id, expected=f"one of {sorted(self._layer_by_id)}"
            ) from None


class AttentionBackend(ABC):
    """Attention for every layer of one model on one device.

    A step prepares its metadata once and then runs each layer. Preparation has two halves, so
    that it can straddle a device graph:

    ========================= =========== ==============================
    half                      eager       with a graph
    ========================= =========== ==============================
    `..._out_graph`           called      called before capture and before each replay
    `..._in_graph`            called      captured, then replayed by the graph
    ========================= =========== ==============================

    One instance has one step in flight.
    """

    def __init__(self, context: BackendContext, options: Mapping[str, object] = NO_OPTIONS) -> None:
        self.context = context
        self.options = options
        self._dtype = torch_dtype(context.request.dtype) if context.request.dtype else None

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Prepare an eager step.

        Raises InvalidInput for a batch whose fields have other shapes or dtypes than documented.
        """
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
        """The backend that serves steps of that mode: itself, but for a composite."""
        return self

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate the buffers that graphs of steps up to this size point at.

        Called by each runner of graphs, for decoding and for verification, before it captures. What
        earlier calls made stays where it is, since captured graphs read it: a call whose sizes
        they do not hold adds buffers. A step that is larger than all of them runs without, eagerly.
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
            raise InvalidInput("v", came=None, expected="V beside K, or k_rope for MLA")

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
        """Attention of one layer: write K and V where asked, then attend over the cache.

        k None means that K and V are in the pool already. `out` and `lse` are written where
        given, else `out` is allocated. Returns `out`, which is the caller's to keep; for IDLE an
        all-zero result with LSE -inf, touching nothing.
        Raises InvalidInput for shapes, dtypes or devices that do not fit the layer and the
        batch, before the pool is touched.
        """
        check_call(
            q,
            k,
            v,
            layer,
            batch,
            dtype=self._dtype,
            q_rope=q_rope,
            k_rope=k_rope,
            out=out,
            lse=lse,
        )
        if batch.forward_mode is ForwardMode.IDLE:
            if lse is not None:
                lse.fill_(-torch.inf)
            if out is None:
                return q.new_zeros((q.shape[0], layer.tp_q_head_num, layer.v_head_dim))
            return out.zero_()
        if self.context.debug:
            check_batch(self.context, batch)
        if k is not None and save_kv_cache:
            self.save_kv(k, v, layer, batch, k_rope=k_rope)
        attend = self.forward_decode if batch.forward_mode.is_decode() else self.forward_extend
        result = attend(
            q, k, v, layer, batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope, out=out, lse=lse
        )
        return result if out is None or result is out else out.copy_(result)

    @abstractmethod
    def forward_decode(
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
        """One new token a request; K and V are in the pool.

        Returns `out`, or a tensor of the backend's own, which `forward` copies to `out` where
        the caller gave one. `lse` is written where given.
        """

    @abstractmethod
    def forward_extend(
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
        """Many new tokens a request on top of a cached prefix; returns like `forward_decode`.

        With save_kv_cache False and k given, the new tokens' K and V are not in the pool: they
        are `k` and `v` themselves, and there is no prefix.
        """
