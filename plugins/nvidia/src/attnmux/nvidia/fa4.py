"""FlashAttention 4: one call of the library for each layer, over the pool's own pages.

Its conventions and ours: LSE is a natural logarithm, [Hq, T], with `qv` [T, Hq]; sinks are in it.
Causality counts from the end of the keys. Over a latent, a logit is q · k + qv · v, of the rotary
parts and of the latents: the absorbed one. A request that has queries and no keys is garbage there;
extend has none, as each token sees itself. The library allocates its output, so that a caller's
costs a copy, and rows that no request owns are what the allocator left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.nvidia.fa4.calls import LayerCall
from attnmux.nvidia.latent import rotary
from attnmux.nvidia.page_tables import Step
from attnmux.nvidia.results import nothing, store_lse
from attnmux.nvidia.rows import aligned
from attnmux.nvidia.steps import prepared

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.nvidia.fa4.kernels import Kernels

_SERVED = (ForwardMode.EXTEND, ForwardMode.MIXED)


class FA4Backend(AttentionBackend):
    """Prefill of MHA, GQA and MLA; decoding, verification and drafts are another backend's."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: Kernels
    ) -> None:
        """Raises InvalidInput for layers and pools that the kernels do not serve."""
        super().__init__(context, options)
        self._kernels = kernels
        self._calls = {layer.layer_id: LayerCall.of(layer, context) for layer in context.layers}
        caches = (call.cache for call in self._calls.values())
        self._groups = tuple(dict.fromkeys(cache.group for cache in caches if cache is not None))
        self._step: Step | None = None
        self._may_pad = False
        self._unowned: torch.Tensor | None = None
        """[T, 1, 1] bool: rows of no request. None where there is none."""

    @property
    def calls(self) -> Iterable[LayerCall]:
        """What the library is told of each layer."""
        return self._calls.values()

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Decide the step's shape on the host; nothing is launched.

        Raises InvalidInput for a step that is no prefill.
        """
        self._step, self._unowned = None, None
        if batch.forward_mode is ForwardMode.IDLE:
            return
        if batch.forward_mode not in _SERVED:
            raise _only_prefill(batch.forward_mode)
        self._step = Step.of(batch, self.context, {})
        lens = batch.extend_seq_lens_cpu
        self._may_pad = lens is None or int(lens.sum()) < batch.num_tokens

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Build page tables and bounds on the device."""
        if self._step is not None:
            self._step.fill(batch, self._groups, self.context)
            if self._may_pad:
                bounds = self._step.query_bounds(self.context.device)
                rows = torch.arange(batch.num_tokens, device=bounds.device)
                self._unowned = (rows >= bounds[-1]).view(-1, 1, 1)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        """Raises InvalidInput: it serves no decode step."""
        raise _only_prefill(batch.forward_mode)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        step, own = prepared(self._step), self._calls[call.layer.layer_id]
        k, v = call.k, call.v
        if not call.q.shape[0]:
            return nothing(call.q, call.layer, call.out, call.lse)
        if call.layer.kind == "mla":
            # The latents are the library's V, the rotary parts its K.
            queries = {"q": aligned(rotary(call.q_rope)), "qv": aligned(call.q)}
            k, v = call.k_rope, k
        else:
            queries = {"q": aligned(call.q)}
        bounds = step.query_bounds(call.q.device)
        if k is None or v is None or call.save_kv_cache:
            keys = _cached(own, step)
        else:
            keys = _of_call(k, v, bounds, step, call.q.dtype)
        result, kernels_lse = self._kernels.flash_attn_varlen_func(
            **queries,
            **keys,
            cu_seqlens_q=bounds,
            max_seqlen_q=step.max_seqlen_q,
            return_lse=call.lse is not None,
            **own.arguments,
        )
        if call.lse is not None:
            if call.layer.kind == "mla":
                call.lse.copy_(kernels_lse)
            else:
                store_lse(kernels_lse, call.lse, None)
        attended: torch.Tensor = result
        return attended if self._unowned is None else attended.masked_fill_(self._unowned, 0)


def _cached(call: LayerCall, step: Step) -> dict[str, Any]:
    """The layer's keys in the pool, by the library's names."""
    cache = call.required_cache()
    keys = step.keys[cache.group]
    return {
        "k": cache.k,
        "v": cache.v,
        "seqused_k": keys.lens,
        "page_table": keys.page_table,
        "max_seqlen_k": step.max_seqlen_k,
    }


def _of_call(
    k: torch.Tensor, v: torch.Tensor, bounds: torch.Tensor, step: Step, dtype: torch.dtype
) -> dict[str, Any]:
    """The call's own keys, by the library's names; there is no prefix."""
    if k.dtype != dtype or v.dtype != dtype:
        raise InvalidInput("k", came=f"{k.dtype} and {v.dtype}", expected=f"{dtype}, as q is")
    return {
        "k": aligned(k),
        "v": aligned(v),
        "cu_seqlens_k": bounds,
        "max_seqlen_k": step.max_seqlen_q,
    }


def _only_prefill(mode: ForwardMode) -> InvalidInput:
    return InvalidInput(
        "forward_mode", came=mode.name, expected="EXTEND or MIXED: the card has no other phase"
    )
