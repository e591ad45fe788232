"""Dual chunk attention: a call of FlashAttention 3 for each of a token's three queries, merged.

Q is [T, Hq, 3 * D]. A token meets the keys of its own chunk, causally, with the first D, those of
the chunk before with the second and all before that with the third. Rotating K and the queries, and
scaling them by their places, is the model's to do.

The library's conventions and ours: LSE comes as [B, Hq, Tq] or [Hq, T] and is a natural logarithm,
as ours; causality counts from the end of the keys, which is where a piece's queries end; a piece
without keys has output 0 and LSE -inf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.context import BackendContext
from attnmux.core.errors import GraphUnsupported, InvalidInput
from attnmux.nvidia.dual_chunk.layers import LayerCall
from attnmux.nvidia.dual_chunk.merging import merged
from attnmux.nvidia.dual_chunk.pieces import Pieces
from attnmux.nvidia.dual_chunk.regions import Group, Regions, fixed_keys, in_call, in_pool
from attnmux.nvidia.page_tables import Keys
from attnmux.nvidia.results import nothing
from attnmux.nvidia.rows import aligned, is_aligned
from attnmux.nvidia.steps import check_room, prepared

if TYPE_CHECKING:
    from attnmux.core.layer import LayerSpec
    from attnmux.nvidia.dual_chunk.kernels import Kernels


class DualChunkBackend(AttentionBackend):
    """Qwen2.5-1M's attention on Hopper and Ampere GPUs, over all keys."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: Kernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the kernels do not serve."""
        super().__init__(context, options)
        self._kernels = kernels
        self._calls = {layer.layer_id: LayerCall.of(layer, context) for layer in context.layers}
        groups = (call.group for call in self._calls.values() if call.group is not None)
        self._groups = tuple(dict.fromkeys(groups))
        self._fixed: dict[Group, tuple[Keys, ...]] = {}
        self._fixed_batch_size = 0
        self._outgrown: list[dict[Group, tuple[Keys, ...]]] = []
        self._longest: int | None = None
        self._buffers: dict[Group, tuple[Keys, ...]] = {}
        self._regions: dict[Group, Regions] = {}
        self._in_call: dict[int, Regions] = {}

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Decide the step's shape on the host; nothing is launched.

        Without host mirrors, a request counts as long as it can be.
        Raises InvalidInput for what the kernels do not serve: drafts, masks, many items. Raises
        GraphUnsupported for a captured step of another mode than decode.
        """
        self._longest = None
        if batch.forward_mode is ForwardMode.IDLE:
            return
        _check_served(batch)
        if in_capture:
            if not batch.forward_mode.is_decode():
                mode = batch.forward_mode.name
                raise GraphUnsupported(f"{mode} is captured by no graph: decode is")
            check_room(batch, self._fixed_batch_size)
        self._buffers = self._fixed if in_capture else {}
        self._longest = self.context.max_context_len
        if batch.seq_lens_cpu is not None and not in_capture:
            self._longest = max(int(batch.seq_lens_cpu.max()), 1) if batch.batch_size else 1

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Build page tables and lengths on the device: at replay from what the batch then holds."""
        self._in_call.clear()
        self._regions.clear()
        if self._longest is None:
            return
        pieces = {
            chunk_len: Pieces.of(batch, chunk_len)
            for chunk_len in {group.chunk_len for group in self._groups}
        }
        for group in self._groups:
            self._regions[group] = in_pool(
                pieces[group.chunk_len],
                group,
                self.context,
                longest=self._longest,
                fixed=self._buffers.get(group, ()),
            )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """For decode alone. Called again, it keeps what captured graphs point at."""
        if max_bs > self._fixed_batch_size:
            self._outgrown.append(self._fixed)
            self._fixed = {group: fixed_keys(group, max_bs, self.context) for group in self._groups}
            self._fixed_batch_size = max_bs

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._paged(call.q, call.layer, call.out, call.lse)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if call.k is None or call.v is None or call.save_kv_cache:
            return self._paged(call.q, call.layer, call.out, call.lse)
        if call.k.dtype != call.q.dtype or call.v.dtype != call.q.dtype:
            raise InvalidInput(
                "k", came=f"{call.k.dtype} and {call.v.dtype}", expected=f"{call.q.dtype}, as q is"
            )
        chunk_len = call.layer.dual_chunk_len
        regions = self._in_call.get(chunk_len)
        if regions is None:
            regions = self._in_call[chunk_len] = in_call(batch, chunk_len)
        k_cache, v_cache = aligned(call.k).unsqueeze(1), aligned(call.v).unsqueeze(1)
        return self._attend(call.q, k_cache, v_cache, call.layer, regions, call.out, call.lse)

    def _paged(
        self,
        q: torch.Tensor,
        layer: LayerSpec,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        group, k_cache, v_cache = self._calls[layer.layer_id].required()
        regions = prepared(self._regions.get(group))
        return self._attend(q, k_cache, v_cache, layer, regions, out, lse)

    def _attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        layer: LayerSpec,
        regions: Regions,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Over caches [pages, page, Hkv, D]."""
        if not q.shape[0]:
            return nothing(q, layer, out, lse)
        alone = len(regions.keys) == 1
        into = out if alone and out is not None and is_aligned(out) else None
        q, dim = aligned(q), layer.qk_head_dim
        outs, lses = [], []
        for number, keys in enumerate(regions.keys):
            result, of_region = self._region(
                q[..., number * dim : (number + 1) * dim],
                k_cache,
                v_cache,
                keys,
                regions.query_bounds,
                out=into,
                softmax_scale=layer.scaling,
                causal=number == 0,
            )
            outs.append(result)
            lses.append(of_region)
        result, merged_lse = (outs[0], lses[0]) if alone else merged(outs, lses)
        if lse is not None:
            lse.copy_(merged_lse)
        if into is not None:
            return into
        return result.to(q.dtype) if out is None else out.copy_(result)

    def _region(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        keys: Keys,
        query_bounds: torch.Tensor | None,
        *,
        out: torch.Tensor | None,
        **arguments: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, Hq, D] and LSE [T, Hq] of one of the queries, [T, Hq, D]."""
        if query_bounds is None:
            q, out = q.unsqueeze(1), None if out is None else out.unsqueeze(1)
        else:
            arguments |= {"cu_seqlens_q": query_bounds, "max_seqlen_q": q.shape[0]}
        result, lse, *_ = self._kernels.flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=keys.lens,
            page_table=keys.page_table,
            return_softmax_lse=True,
            out=out,
            **arguments,
        )
        if query_bounds is None:
            return result.squeeze(1), lse.squeeze(-1)
        return result, lse.t()


def _check_served(batch: ForwardBatch) -> None:
    mode = batch.forward_mode
    if mode.is_target_verify() or mode.is_draft_extend() or batch.spec_info is not None:
        raise InvalidInput("forward_mode", came=mode.name, expected="EXTEND, MIXED or DECODE")
    if batch.multi_item is not None:
        raise InvalidInput("multi_item", came="many items", expected="None")
    if batch.encoder_lens is not None:
        raise InvalidInput("encoder_lens", came="an encoder's lengths", expected="None")
    if mode.is_decode() and batch.num_tokens != batch.batch_size:
        raise InvalidInput(
            "out_cache_loc",
            came=f"{batch.num_tokens} tokens of {batch.batch_size} requests",
            expected="one token a request in decode",
        )
