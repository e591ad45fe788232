"""The module that a model calls attention through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.op import attention_with_output, current_forward_context

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.layer import LayerSpec


class RadixAttention(torch.nn.Module):
    """Attention of one layer over the paged KV cache.

    It runs the backend and batch of the surrounding `forward_context`. Under `torch.compile`
    the call is one opaque op, so a model compiles as a single graph whatever the backend is.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend; see `AttentionBackend.forward` for the shapes. Heads may come flattened.

        Returns [T, Hq, Dv]. With k and v None they are already in the pool.
        Raises InvalidInput when `batch` is not the one of the forward context.
        """
        spec = self.spec
        rope_dim = spec.qk_rope_head_dim
        q = q.view(-1, spec.tp_q_head_num, spec.qk_head_dim - rope_dim)
        if k is not None:
            k = k.view(-1, spec.tp_k_head_num, spec.qk_head_dim - rope_dim)
        if v is not None:
            v = v.view(-1, spec.tp_v_head_num, spec.v_head_dim)
        if torch.compiler.is_compiling():
            out = q.new_empty((q.shape[0], spec.tp_q_head_num, spec.v_head_dim))
            attention_with_output(q, k, v, q_rope, k_rope, out, None, spec.layer_id, save_kv_cache)
            return out
        context = current_forward_context()
        if batch is not context.batch:
            raise InvalidInput(
                "batch", came="another batch", expected="the batch of the forward context"
            )
        return context.backend.forward(
            q, k, v, spec, batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope
        )
