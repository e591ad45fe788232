"""The contract of an attention backend.

T new tokens and B requests of a step. `q [T, Hq, D]`, `k, v [T, Hkv, D]`, `out [T, Hq, Dv]`,
`lse [T, Hq]` float32. LSE is the natural logarithm of the softmax's denominator, sinks
included; a row without keys has LSE -inf and output 0. MLA is called absorbed: `q [T, Hq, rank]`,
`q_rope [T, Hq, rope]`, `k [T, 1, rank]`, `k_rope [T, 1, rope]`, `v` None, `out [T, Hq, rank]`.

The token stride of `q`, `k` and `v` is arbitrary, since they may be slices of one projection. A
token's heads are contiguous, except that `q` and `q_rope` may be parts of one [T, Hq, rank + rope].
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

import torch

from attnmux.core.contract.arguments import check_call, check_fields, check_result
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.call import AttentionCall
from attnmux.core.contract.context import BackendContext, LinearLayers
from attnmux.core.contract.debug import check_batch, check_picks, check_tensors, check_types
from attnmux.core.contract.dtypes import torch_dtype
from attnmux.core.contract.latent import UpProjection
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.contract.mode import ForwardMode
from attnmux.core.contract.sinks import refresh_sinks
from attnmux.core.contract.steps import NO_OPTIONS, StepBackend
from attnmux.core.facts.errors import InvalidInput


class AttentionBackend(StepBackend):
    """Attention for every layer of one model on one device.

    A step prepares its metadata once, see `StepBackend`, and then runs each layer.
    """

    def __init__(self, context: BackendContext, options: Mapping[str, object] = NO_OPTIONS) -> None:
        self.context = context
        self.options = options
        self._dtype = torch_dtype(context.request.dtype) if context.request.dtype else None
        self._kv_writer = context.kv_writer

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.check_step(batch)
        super().init_forward_metadata(batch)

    def check_step(self, batch: ForwardBatch) -> None:
        """Raise InvalidInput for a malformed batch, in debug mode also for contradicting values."""
        if self.context.debug:
            check_types("batch", batch, ForwardBatch)
        check_fields(batch)
        if self.context.debug and batch.forward_mode is not ForwardMode.IDLE:
            check_batch(self.context, batch)

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """The backend that serves steps of that mode. Composites return a child."""
        return self

    def linear(self, kind: str) -> LinearLayers:
        """The `LinearAttentionBackend` of that kind of layers, prepared together with this one.

        Raises InvalidInput for a kind that the decision's model does not have.
        """
        raise InvalidInput("kind", got=kind, expected="attention: this model has no linear layers")

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        """Raise InvalidInput if the backend gives no LSE of the layer in such a step.

        `forward` calls it before K and V are written. The default gives all.
        """

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
        """Write the new tokens' K and V to the pool, by the context's `kv_writer` if it has one.

        Raises InvalidInput, before anything is written, for missing slots, a missing V, and values
        that the pool refuses.
        """
        loc = batch.encoder_out_cache_loc if layer.is_cross_attention else batch.out_cache_loc
        if loc is None:
            expected = "slots for the encoder's K and V"
            raise InvalidInput("encoder_out_cache_loc", got=None, expected=expected)
        second = v if k_rope is None else k_rope
        if second is None:
            raise InvalidInput("v", got=None, expected="V next to K, or k_rope for MLA")
        pool = self.context.token_to_kv_pool
        if self._kv_writer is not None:
            self._kv_writer.write(layer, loc, k, second, is_latent=k_rope is not None)
        elif k_rope is not None:
            pool.set_mla_kv_buffer(layer, loc, k, second, layer.k_scale)
        else:
            pool.set_kv_buffer(layer, loc, k, second, layer.k_scale, layer.v_scale)

    def refresh_sinks(self, weights: Sequence[torch.Tensor]) -> None:
        """Copy the model's weights into the sinks of the layers, and these into every copy.

        An engine calls it in each step, first in a device graph. So weights that change in place
        count from the next step on, also in graphs. torch may join the copies
        of all layers. weights: [Hq] for each layer with sinks, in the order of the context's.
        """
        refresh_sinks(self.context.layers, weights)

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

        Without k, K and V are already in the pool. With k and save_kv_cache False, `k` and `v` are
        all keys and there is no prefix; of MLA, `[k, k_rope]` are the keys and `k` the values, and
        every backend that serves extend for MLA or nsa serves such a call. Returns `out`, newly
        allocated unless given; an IDLE step returns `call.empty_result()` and leaves the pool
        alone.
        Raises InvalidInput, before the pool is touched, for shapes, dtypes or devices that do not
        fit the layer and the batch; AttnmuxError for a result that does not.
        """
        call = AttentionCall(q, k, v, layer, save_kv_cache, q_rope, k_rope, out, lse)
        if self.context.debug:
            check_types("batch", batch, ForwardBatch)
            check_types("call", call, AttentionCall)
            check_fields(batch)
            if batch.forward_mode is not ForwardMode.IDLE:
                check_tensors(self.context, call)
                check_batch(self.context, batch)
                check_picks(batch, layer.index_block_size)
        check_call(call, batch, dtype=self._dtype)
        if batch.forward_mode is ForwardMode.IDLE:
            return call.empty_result()
        if lse is not None:
            self.check_lse(layer, batch)
        if k is not None and save_kv_cache:
            self.save_kv(k, v, layer, batch, k_rope=k_rope)
        attend = self.forward_decode if batch.forward_mode.is_decode() else self.forward_extend
        result = attend(call, batch)
        if out is None:
            check_result(result, call, type(self).__name__)
            return result
        if result is not out:
            check_result(result, call, type(self).__name__)
            out.copy_(result)
        return out

    def forward_latent(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        projection: UpProjection,
    ) -> torch.Tensor:
        """Attention of one MLA layer, absorbed, from the heads' own queries to their own outputs.

        q: [T, Hq, nope + rope]. latent, k_rope: [T, 1, rank] and [T, 1, rope] of the new tokens,
        which are written to the pool. Returns [T, Hq, v]. Raises what `forward` raises.
        """
        nope, rope = projection.absorbed_queries(q)
        out = self.forward(nope, latent, None, layer, batch, q_rope=rope, k_rope=k_rope)
        return projection.outputs(out)

    @abstractmethod
    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        """Attention of one new token a request, with K and V in the pool.

        Returns `call.out`, or another tensor, which `forward` copies to `call.out` if that is
        given. Writes `call.lse` if given.
        """

    @abstractmethod
    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        """Attention of many new tokens a request after a prefix; else as `forward_decode`."""
