"""DeepSeek's sparse attention: FlashMLA's sparse prefill kernel for each layer of every step,
decoding included, over the pool's own rows.

The kernel reads rows of K by their numbers, and knows neither pages nor requests: places in a
request become slots here, on the device, as each layer's indexer has written them. Its conventions
and ours: Q [T, 64 or 128, 576] is latent and rotary part in one row; LSE [T, heads] has base e or
2, as measured, and is +inf for a query without keys, whose output is 0; -1 among the indices is no
key. It allocates its output by itself. FlashMLA's sparse decode kernel wants rows of 656 bytes,
which no pool of ours stores: rows of e4m3 are widened to bfloat16 for this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.context import BackendContext
from attnmux.core.errors import GraphUnsupported, InvalidInput
from attnmux.core.indices import cu_seqlens, token_rows
from attnmux.nvidia.latent import RANK, joined, latent_layers
from attnmux.nvidia.nsa.calls import LayerCall
from attnmux.nvidia.nsa.picks import picked
from attnmux.nvidia.results import nothing
from attnmux.nvidia.steps import prepared

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.layer import LayerSpec
    from attnmux.nvidia.nsa.kernels import Kernels


class NSABackend(AttentionBackend):
    """Prefill and decoding of MLA over the keys that an indexer picks."""

    def __init__(
        self,
        context: BackendContext,
        options: Mapping[str, object],
        kernels: Kernels,
        *,
        lse_unit: float,
    ) -> None:
        """lse_unit: what the kernel's LSE is multiplied by to be a natural logarithm.

        Raises InvalidInput for layers and pools that the kernels do not serve.
        """
        super().__init__(context, options)
        self._kernels = kernels
        self._lse_unit = lse_unit
        self._calls = {
            layer.layer_id: LayerCall.of(layer, context) for layer in latent_layers(context)
        }
        self._rows: torch.Tensor | None = None
        """[T] int64: each token's row of the request table."""

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Nothing is known of the keys before a layer's indexer wrote them.

        Raises GraphUnsupported for a captured step that does not decode, InvalidInput for a custom
        mask.
        """
        self._rows = None
        if batch.spec_info is not None and batch.spec_info.custom_mask is not None:
            raise InvalidInput("custom_mask", came="a mask", expected="None: the indexer masks")
        if in_capture and not batch.forward_mode.is_decode():
            raise GraphUnsupported(f"{batch.forward_mode.name} is captured by no graph: decode is")

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Find each token's request."""
        if batch.forward_mode is ForwardMode.IDLE:
            return
        self._rows = batch.req_pool_indices
        if batch.extend_seq_lens is not None:
            self._rows = token_rows(self._rows, batch.extend_seq_lens, batch.num_tokens)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """A decoding step reads the batch's own tensors alone."""

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        own = self._call(call.layer)
        places = self._slots(call.layer, batch)
        return self._attend(
            call.q, call.q_rope, own, own.cache, places, call.layer, call.out, call.lse
        )

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if call.k is None or call.save_kv_cache:
            return self.forward_decode(call, batch)
        own, keys = self._call(call.layer), joined(call.k, call.k_rope)
        return self._attend(
            call.q, call.q_rope, own, keys, _rows_of_call(batch), call.layer, call.out, call.lse
        )

    def _attend(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        call: LayerCall,
        cache: torch.Tensor,
        places: torch.Tensor,
        layer: LayerSpec,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Over the rows `places` [T, topk] of cache [n, 1, 576]."""
        if not q.shape[0]:
            return nothing(q, layer, out, lse)
        scale = call.scale if cache is call.cache else 1.0
        queries = call.queries(q, q_rope)
        parts, heads = [], call.num_heads
        for part in picked(cache, places):
            result, _, kernels_lse = self._kernels.flash_mla_sparse_fwd(
                queries if part.tokens is None else queries[part.tokens],
                part.kv,
                part.indices,
                layer.scaling * scale,
                RANK,
                **self._kernels.constants,
            )
            parts.append(result[:, :heads] if heads < call.kernel_heads else result)
            if lse is not None:
                self._store_lse(kernels_lse, lse if part.tokens is None else lse[part.tokens])
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        if scale != 1:
            attended = attended * scale
        return attended if out is not None else attended.contiguous()

    def _store_lse(self, source: torch.Tensor, lse: torch.Tensor) -> None:
        """The kernel's LSE [t, kernel heads] to the caller's [t, Hq]."""
        source = source[:, : lse.shape[1]]
        lse.copy_(torch.where(source.isposinf(), -torch.inf, source * self._lse_unit))

    def _slots(self, layer: LayerSpec, batch: ForwardBatch) -> torch.Tensor:
        """[T, topk] int32: slots of the layer's keys, -1 for none."""
        rows = prepared(self._rows)
        table, pool = self.context.req_to_token_pool.req_to_token, self.context.token_to_kv_pool
        slots = self._kernels.topk_slots(table, rows, _picks(batch))
        translated = pool.translate(slots, layer.layer_id)
        return slots if translated is slots else torch.where(slots < 0, -1, translated)

    def _call(self, layer: LayerSpec) -> LayerCall:
        call = self._calls.get(layer.layer_id)
        if call is None:
            raise InvalidInput("layer", came=f"{layer.kind}, id {layer.layer_id}", expected="mla")
        return call


def _picks(batch: ForwardBatch) -> torch.Tensor:
    if batch.topk_indices is None:
        raise InvalidInput(
            "topk_indices",
            came=None,
            expected="the keys that the indexer picked: the model writes them before each layer",
        )
    return batch.topk_indices


def _rows_of_call(batch: ForwardBatch) -> torch.Tensor:
    """[T, topk] int32: rows of the call's own k, where there is no prefix."""
    picks, new = _picks(batch), batch.extend_seq_lens
    if new is None:
        raise InvalidInput("extend_seq_lens", came=None, expected="lengths in an extend step")
    starts = token_rows(cu_seqlens(new)[:-1].long(), new, batch.num_tokens).int()
    return torch.where(picks < 0, -1, starts.unsqueeze(1) + picks)
