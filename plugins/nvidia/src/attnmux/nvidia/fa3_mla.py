"""FlashAttention 3 over a latent cache: Q's rotary part against K, the rest (`qv`) against V.

The library's conventions and ours: a logit is q · k + qv · v, which is the absorbed one; LSE comes
as [B, Hq, Tq] or [Hq, T] and is a natural logarithm, as ours; causality counts from the end of the
keys. It takes no mask: all drafts of a tree attend to the prefix, and each to its own ancestors, as
a request of one query whose table names slots; `merge_state_v2` makes one of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.nvidia.fa3.calls import splits
from attnmux.nvidia.fa3.drafts import merge
from attnmux.nvidia.fa3.schedules import Schedules
from attnmux.nvidia.fa3.stepping import SteppingBackend
from attnmux.nvidia.fa3_mla.calls import LayerCall
from attnmux.nvidia.latent import rotary
from attnmux.nvidia.page_tables import Step
from attnmux.nvidia.results import nothing, store_lse
from attnmux.nvidia.rows import aligned, by_request, is_aligned, is_writable
from attnmux.nvidia.steps import prepared

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.call import AttentionCall
    from attnmux.core.layer import LayerSpec
    from attnmux.nvidia.fa3.kernels import Kernels


class FA3MLABackend(SteppingBackend):
    """MLA on Hopper GPUs, absorbed."""

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

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call.q, call.q_rope, None, None, call.layer, call.out, call.lse)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        k, k_rope = (None, None) if call.save_kv_cache else (call.k, call.k_rope)
        return self._attend(call.q, call.q_rope, k, k_rope, call.layer, call.out, call.lse)

    def _attend(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        k: torch.Tensor | None,
        k_rope: torch.Tensor | None,
        layer: LayerSpec,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Over k and k_rope where they are given, else over the pool."""
        step, call = prepared(self._step), self._calls[layer.layer_id]
        q_rope = rotary(q_rope)
        if not q.shape[0]:
            return nothing(q, layer, out, lse)
        q, q_rope = aligned(q), aligned(q_rope)
        if k is not None and k_rope is not None:
            return self._in_call(q, q_rope, k, k_rope, call, step, out, lse)
        if step.is_tree:
            return self._tree(q, q_rope, call, step, out, lse)
        return self._paged(q, q_rope, call, step, out, lse)

    def _paged(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        call: LayerCall,
        step: Step,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        group, pages, _ = call.stored()
        arguments: dict[str, Any] = {}
        each = step.queries_each
        into = None if out is None or not is_aligned(out) else out
        if each is None:
            arguments["cu_seqlens_q"] = step.query_bounds(q.device)
            arguments["max_seqlen_q"] = step.max_seqlen_q
        else:
            q, q_rope = by_request(q, each), by_request(q_rope, each)
            into = None if into is None else by_request(into, each)
        result = call.over(
            self._kernels,
            pages,
            step.keys[group],
            q,
            q_rope,
            out=into,
            return_softmax_lse=lse is not None,
            scheduler_metadata=self._schedules.of(call.kind),
            **arguments,
        )
        if lse is not None:
            result, kernels_lse, *_ = result
            store_lse(kernels_lse, lse, each)
        if into is not None and out is not None:
            return out
        attended: torch.Tensor = result.flatten(0, -3)
        return attended

    def _tree(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        call: LayerCall,
        step: Step,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Over the prefix, and over each draft token's ancestors and itself."""
        group, pages, slots = call.stored()
        each = step.max_seqlen_q
        if out is None or not is_writable(out):
            out = q.new_empty((*q.shape[:2], call.layer.v_head_dim))
        _, prefix_lse, *_ = call.over(
            self._kernels,
            pages,
            step.keys[group],
            by_request(q, each),
            by_request(q_rope, each),
            out=by_request(out, each),
            return_softmax_lse=True,
            causal=False,
        )
        drafts, drafts_lse, *_ = call.over(
            self._kernels,
            slots,
            self._drafts.keys[group],
            by_request(q, 1),
            by_request(q_rope, 1),
            return_softmax_lse=True,
            causal=False,
            num_splits=1,  # There are d keys at most.
        )
        merge(self._kernels.merge_state_v2, out, prefix_lse, drafts, drafts_lse, lse)
        return out

    def _in_call(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        k: torch.Tensor,
        k_rope: torch.Tensor,
        call: LayerCall,
        step: Step,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        """Over the call's own latents; there is no prefix."""
        if k.dtype != q.dtype or k_rope.dtype != q.dtype:
            raise InvalidInput(
                "k", came=f"{k.dtype} and {k_rope.dtype}", expected=f"{q.dtype}, as q is"
            )
        query_bounds = step.query_bounds(q.device)
        into = None if out is None or not is_aligned(out) else out
        result = self._kernels.flash_attn_varlen_func(
            q_rope,
            aligned(k_rope),
            aligned(k),
            query_bounds,
            query_bounds,
            max_seqlen_q=step.max_seqlen_q,
            max_seqlen_k=step.max_seqlen_q,
            qv=q,
            return_softmax_lse=lse is not None,
            out=into,
            **{**call.arguments, "num_splits": 1},
        )
        if lse is not None:
            result, kernels_lse, *_ = result
            store_lse(kernels_lse, lse, None)
        attended: torch.Tensor = result
        return attended if into is None or out is None else out
