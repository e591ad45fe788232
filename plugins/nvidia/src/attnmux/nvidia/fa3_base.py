"""FlashAttention 3: one call of the library for each layer, over the pool's own pages. Where no
request has a prefix it reads K and V of the call: they lie end to end, which the kernels load
faster than pages.

Its conventions and ours: LSE comes as [B, Hq, Tq] or [Hq, T] and is a natural logarithm, as ours;
a window of w keys before a token is (w, 0); causality counts from the end of the keys. It takes no
mask: all drafts of a tree attend to the prefix, and each to its own ancestors, as a request of one
query whose table names slots; `merge_state_v2` makes one of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.nvidia.fa3.calls import LayerCall, splits
from attnmux.nvidia.fa3.drafts import merge
from attnmux.nvidia.fa3.schedules import Schedules
from attnmux.nvidia.fa3.stepping import SteppingBackend
from attnmux.nvidia.page_tables import Step
from attnmux.nvidia.results import nothing, store_lse
from attnmux.nvidia.rows import aligned, by_request, is_aligned, is_writable
from attnmux.nvidia.steps import prepared

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.call import AttentionCall
    from attnmux.core.layer import LayerSpec
    from attnmux.nvidia.fa3.kernels import Kernels


class FA3Backend(SteppingBackend):
    """MHA and GQA on Hopper GPUs."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: Kernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the kernels do not serve."""
        num_splits = splits(context, options)
        self._calls = {
            layer.layer_id: LayerCall.of(layer, context, num_splits=num_splits)
            for layer in context.layers
        }
        groups = (call.group for call in self._calls.values() if call.group is not None)
        kinds = (call.kind for call in self._calls.values())
        schedules = Schedules(kinds, kernels.get_scheduler_metadata, context)
        super().__init__(context, options, groups, schedules=schedules)
        self._kernels = kernels
        self._without_trees = [
            call.layer.layer_id for call in self._calls.values() if not call.serves_trees
        ]

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Decide the step's shape on the host; nothing is launched.

        Raises InvalidInput for a draft tree in layers that hide more than its mask, or with sinks;
        in debug mode for a mask that is not a draft tree's.
        """
        super().init_forward_metadata_out_graph(batch, in_capture)
        if self._step is not None and self._step.is_tree and self._without_trees:
            self._step = None
            raise InvalidInput(
                "spec_info.custom_mask",
                came=f"a draft tree, in layers {self._without_trees}",
                expected="None in layers with a window, a chunk, sinks or cross attention",
            )

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call.q, None, None, call.layer, batch, call.out, call.lse)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        k, v = call.k, call.v
        if call.save_kv_cache and not (
            prepared(self._step).has_all_keys
            and self._calls[call.layer.layer_id].stores_as_given(call.q, k, v)
        ):
            k = v = None
        return self._attend(call.q, k, v, call.layer, batch, call.out, call.lse)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Over k and v where they are given, else over the pool."""
        step, call = prepared(self._step), self._calls[layer.layer_id]
        no_keys = k is not None and not k.shape[0]
        if not q.shape[0] or no_keys:
            return nothing(q, layer, out, lse)
        into = None if out is None or not is_aligned(out) else out
        if k is not None and v is not None:
            result = self._in_call(q, k, v, call, step, batch, into, lse)
        elif step.is_tree:
            return self._tree(q, call, step, out, lse)
        else:
            result = self._paged(q, call, step, into, lse)
        if lse is not None and layer.sinks is not None:
            # Without keys the kernel leaves the sink out of LSE.
            lse.copy_(torch.where(lse.isneginf(), layer.sinks, lse))
        return result

    def _paged(
        self,
        q: torch.Tensor,
        call: LayerCall,
        step: Step,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        (group, pages, _), dtype = call.stored(), q.dtype
        q = call.queries(q)
        into = None if out is None or not call.writes(out) else out
        arguments: dict[str, Any] = {}
        each = step.queries_each
        if each is None:
            arguments["cu_seqlens_q"] = step.query_bounds(q.device)
            arguments["max_seqlen_q"] = step.max_seqlen_q
        else:
            q = by_request(q, each)
            into = None if into is None else by_request(into, each)
        result = call.over(
            self._kernels,
            pages,
            step.keys[group],
            q,
            return_softmax_lse=lse is not None,
            out=into,
            scheduler_metadata=self._schedules.of(call.kind),
            **arguments,
        )
        if lse is not None:
            result, kernels_lse, *_ = result
            store_lse(kernels_lse, lse, each)
        if into is not None and out is not None:
            return out
        attended: torch.Tensor = result.flatten(0, -3)
        return attended.to(dtype)

    def _tree(
        self,
        q: torch.Tensor,
        call: LayerCall,
        step: Step,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Over the prefix, and over each draft token's ancestors and itself."""
        (group, pages, slots), each, dtype = call.stored(), step.max_seqlen_q, q.dtype
        q = call.queries(q)
        into = None if out is None or not is_writable(out) or not call.writes(out) else out
        prefix, prefix_lse, *_ = call.over(
            self._kernels,
            pages,
            step.keys[group],
            by_request(q, each),
            out=None if into is None else by_request(into, each),
            return_softmax_lse=True,
            causal=False,
        )
        drafts, drafts_lse, *_ = call.over(
            self._kernels,
            slots,
            self._drafts.keys[group],
            by_request(q, 1),
            return_softmax_lse=True,
            causal=False,
            num_splits=1,  # There are d keys at most.
        )
        attended = prefix.flatten(0, 1) if into is None else into
        merge(self._kernels.merge_state_v2, attended, prefix_lse, drafts, drafts_lse, lse)
        return attended.to(dtype)

    def _in_call(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: LayerCall,
        step: Step,
        batch: ForwardBatch,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Over the call's own K and V, the encoder's in cross attention; there is no prefix."""
        if k.dtype != q.dtype or v.dtype != q.dtype:
            raise InvalidInput("k", came=f"{k.dtype} and {v.dtype}", expected=f"{q.dtype}, as q is")
        query_bounds = step.query_bounds(q.device)
        is_cross = call.layer.is_cross_attention
        result = self._kernels.flash_attn_varlen_func(
            aligned(q),
            aligned(k),
            aligned(v),
            query_bounds,
            step.encoder_bounds(batch) if is_cross else query_bounds,
            max_seqlen_q=step.max_seqlen_q,
            max_seqlen_k=k.shape[0] if is_cross else step.max_seqlen_q,
            return_softmax_lse=lse is not None,
            out=out,
            **{**call.arguments, "num_splits": 1},
        )
        if lse is not None:
            result, kernels_lse, *_ = result
            store_lse(kernels_lse, lse, None)
        return result if out is None else out
