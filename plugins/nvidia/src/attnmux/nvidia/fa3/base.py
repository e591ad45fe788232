"""FlashAttention 3 of `sgl_kernel`: what `fa3` and `fa3_mla` share.

A step is one call of the library for each layer, over the pool's own pages. LSE comes as
[B, Hq, Tq] or [Hq, T] and is a natural logarithm; causality counts from the end of the keys. The
library takes no mask, so a draft tree is two calls: all drafts attend to the prefix, and each to
its ancestors and itself, as a request of one query whose table names slots.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import InvalidInput, KVPool
from attnmux.core.plugin import Keys, LibraryBackend, PageTables, Rows, check_trees
from attnmux.nvidia.fa3.layers import (
    KV,
    FA3Cache,
    FA3Kernels,
    FA3Layer,
    FA3Schedule,
    read_num_splits,
)
from attnmux.nvidia.fa3.steps import FA3Buffers, FA3Step
from attnmux.nvidia.kernel_rows import FP8, by_request, store_lse
from attnmux.nvidia.packed_values import bounded

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch


class FA3Base(LibraryBackend[FA3Kernels, FA3Layer, FA3Step, FA3Buffers]):
    """Prepares steps and calls the library; subclasses prepare layers, queries and keys."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: FA3Kernels
    ) -> None:
        """Raises InvalidInput for options, layers and pools that the kernels do not serve."""
        self._num_splits = read_num_splits(context, options)
        super().__init__(context, options, kernels)
        caches = [layer.cache for layer in self._layers.values() if layer.cache is not None]
        self._groups = tuple(dict.fromkeys(cache.group for cache in caches))
        self._schedules: dict[FA3Schedule, list[int]] = {}
        """The layers of each. Empty if keys are never split: a schedule would save nothing."""
        for number, layer in self._layers.items():
            if layer.cache is not None and self._num_splits != 1:
                self._schedules.setdefault(layer.cache.schedule, []).append(number)
        self._without_trees = [
            number for number, layer in self._layers.items() if not layer.serves_trees
        ]

    @abstractmethod
    def queries(self, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The library's `q` [T, Hq, D] and `qv` [T, Hq, Dv] or None, in rows that it can load."""

    @abstractmethod
    def own_keys(self, call: AttentionCall, layer: FA3Layer, step: FA3Step) -> KV | None:
        """The call's K and V as the library takes them, [T, Hkv, D]; None to read the pool's."""

    def plan_step(self, batch: ForwardBatch, buffers: FA3Buffers | None) -> FA3Step:
        tables = PageTables.of(batch, self.context, buffers.keys if buffers else {}, trees=True)
        if tables.is_tree:
            self._check_tree(batch)
            if buffers:
                buffers.reserve_drafts(self._groups, tables.max_seqlen_q, self.context.device)
        return FA3Step(tables=tables, buffers=buffers)

    def fill_step(self, step: FA3Step, batch: ForwardBatch) -> None:
        tables = step.tables
        tables.fill(batch, self._groups, self.context)
        if tables.is_tree:
            step.fill_drafts(batch, self._groups, self.context)
        elif tables.batch_size and tables.queries_each is not None:
            # Packed queries have none: how the library splits them depends on their number, which
            # `get_scheduler_metadata` does not take. A launch for no requests ends the process.
            step.fill_schedules(self.kernels, self._schedules)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> FA3Buffers:
        return FA3Buffers.of(self._groups, self._schedules, self.context, max_bs, max_num_tokens)

    def attend(
        self, call: AttentionCall, layer: FA3Layer, step: FA3Step, batch: ForwardBatch
    ) -> torch.Tensor:
        keys = None if batch.forward_mode.is_decode() else self.own_keys(call, layer, step)
        if keys is not None:
            return self._over_own_keys(call, keys, layer, step, batch)
        if layer.cache is None:
            raise call.layer.not_in_pool()
        if step.tables.is_tree:
            return self._over_tree(call, layer, layer.cache, step)
        return self._over_pool(call, layer, layer.cache, step)

    def _over_pool(
        self, call: AttentionCall, layer: FA3Layer, cache: FA3Cache, step: FA3Step
    ) -> torch.Tensor:
        tables, queries = step.tables, step.tables.queries_each
        q, qv, out = self._operands(call, layer)
        arguments: dict[str, Any] = {}
        if queries is None:
            arguments["cu_seqlens_q"] = tables.query_bounds(q.device)
            arguments["max_seqlen_q"] = tables.max_seqlen_q
        else:
            q, qv, out = by_request(q, queries), by_request(qv, queries), by_request(out, queries)
        result = self._call(
            cache.pages,
            tables.keys[cache.group],
            layer,
            q,
            qv=qv,
            out=out,
            return_softmax_lse=call.lse is not None,
            scheduler_metadata=step.schedules.get(call.layer.layer_id),
            **arguments,
        )
        if call.lse is not None:
            result, lse, *_ = result
            _store_lse(lse, call, queries)
        if out is not None and call.out is not None:
            return call.out
        attended: torch.Tensor = result.flatten(0, -3)
        return attended.to(call.q.dtype)

    def _over_tree(
        self, call: AttentionCall, layer: FA3Layer, cache: FA3Cache, step: FA3Step
    ) -> torch.Tensor:
        """Over the prefix, and over each draft token's ancestors and itself."""
        each = step.tables.max_seqlen_q
        q, qv, out = self._operands(call, layer)
        if out is not None and not Rows.is_writable(out):
            out = None
        prefix, prefix_lse, *_ = self._call(
            cache.pages,
            step.tables.keys[cache.group],
            layer,
            by_request(q, each),
            qv=by_request(qv, each),
            out=by_request(out, each),
            return_softmax_lse=True,
            causal=False,
        )
        drafts, drafts_lse, *_ = self._call(
            cache.slots,
            step.drafts[cache.group],
            layer,
            by_request(q, 1),
            qv=by_request(qv, 1),
            return_softmax_lse=True,
            causal=False,
            num_splits=1,  # there are at most d keys
        )
        attended: torch.Tensor = prefix.flatten(0, 1) if out is None else out
        _, merged_lse = self.kernels.merge_state_v2(
            attended,
            prefix_lse.transpose(1, 2).flatten(0, 1).contiguous(),
            drafts.squeeze(1),
            drafts_lse.squeeze(-1),
            v_merged=attended,
        )
        if call.lse is not None:
            call.lse.copy_(merged_lse)
        return attended.to(call.q.dtype)

    def _over_own_keys(
        self, call: AttentionCall, kv: KV, layer: FA3Layer, step: FA3Step, batch: ForwardBatch
    ) -> torch.Tensor:
        """Over K and V of the call, which are the encoder's in cross attention."""
        (k, v), tables = kv, step.tables
        if not k.shape[0]:
            return call.empty_result()
        call.check_keys_dtype(k, v)
        q, qv = self.queries(call)
        bounds = tables.query_bounds(q.device)
        is_cross = call.layer.is_cross_attention
        out = call.out if call.out is not None and Rows.is_aligned(call.out) else None
        result = self.kernels.flash_attn_varlen_func(
            q,
            Rows.aligned(k),
            Rows.aligned(bounded(v, tables.batch_size)),
            bounds,
            tables.encoder_bounds(batch) if is_cross else bounds,
            qv=qv,
            max_seqlen_q=tables.max_seqlen_q,
            max_seqlen_k=k.shape[0] if is_cross else tables.max_seqlen_q,
            return_softmax_lse=call.lse is not None,
            out=out,
            **{**layer.arguments, "num_splits": 1},
        )
        if call.lse is not None:
            result, lse, *_ = result
            _store_lse(lse, call, None)
        attended: torch.Tensor = result if out is None else out
        return attended

    def _operands(
        self, call: AttentionCall, layer: FA3Layer
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """`q`, `qv` and, if the kernels can write to it, the caller's `out`."""
        (q, qv), out = self.queries(call), call.out
        is_quantised = layer.descales is not None
        if is_quantised:
            q = KVPool.quantise(q, FP8, None)  # beyond 448 it saturates
        if out is not None and not (
            Rows.is_aligned(out) and (not is_quantised or out.dtype == torch.bfloat16)
        ):
            out = None
        return q, qv, out

    def _call(
        self,
        kv: KV,
        keys: Keys,
        layer: FA3Layer,
        q: torch.Tensor,
        **arguments: Any,  # noqa: ANN401  # the library's
    ) -> Any:  # noqa: ANN401  # a tuple with LSE
        """Attention over cached keys. arguments: of this call; they override the layer's."""
        if layer.descales is not None:
            k_descale, v_descale = layer.descales
            arguments["k_descale"] = k_descale.expand(len(keys.lens), -1)
            arguments["v_descale"] = v_descale.expand(len(keys.lens), -1)
        return self.kernels.flash_attn_with_kvcache(
            q,
            *kv,
            cache_seqlens=keys.lens,
            page_table=keys.page_table,
            **{**layer.arguments, **arguments},
        )

    def _check_tree(self, batch: ForwardBatch) -> None:
        if self._without_trees:
            raise InvalidInput(
                "spec_info.custom_mask",
                got=f"a draft tree, in layers {self._without_trees}",
                expected="None in layers with a window, a chunk, sinks or cross attention",
            )
        if self.context.debug:
            check_trees(batch)


def _store_lse(source: torch.Tensor, call: AttentionCall, each: int | None) -> None:
    if call.lse is None:
        return
    store_lse(source, call.lse, each)
    if call.layer.sinks is not None:
        # The kernels leave the sink out where a row has no keys.
        call.lse.copy_(torch.where(call.lse.isneginf(), call.layer.sinks, call.lse))
