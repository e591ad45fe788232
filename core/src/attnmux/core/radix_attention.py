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

    It calls the backend of the surrounding `forward_context`. Under `torch.compile` the call is one
    opaque op, so that a model compiles as a single graph with any backend.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        self._layer_id = torch.tensor(spec.layer_id)

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
        """Attend; `AttentionBackend.forward` gives the shapes. Heads may be flattened into one dim.

        Returns [T, Hq, Dv]. k and v are None if they are already in the pool.
        Raises InvalidInput when `batch` is not the one of the forward context.
        """
        spec = self.spec
        rope_dim = spec.qk_rope_head_dim
        dim = spec.qk_head_dim - rope_dim
        q = _by_head("q", q, spec.tp_q_head_num, spec.query_dim)
        k = None if k is None else _by_head("k", k, spec.tp_k_head_num, dim)
        v = None if v is None else _by_head("v", v, spec.tp_v_head_num, spec.v_head_dim)
        if rope_dim:
            q_rope = None if q_rope is None else _by_head("q_rope", q_rope, q.shape[1], rope_dim)
            k_rope = None if k_rope is None else _by_head("k_rope", k_rope, 1, rope_dim)
        if torch.compiler.is_compiling():
            out = q.new_empty((q.shape[0], spec.tp_q_head_num, spec.v_head_dim))
            attention_with_output(
                q,
                k,
                v,
                q_rope,
                k_rope,
                out,
                None,
                self._layer_id,
                save_kv_cache,
                batch.topk_indices,
            )
            return out
        context = current_forward_context()
        if batch is not context.batch:
            raise InvalidInput(
                "batch", got="another batch", expected="the batch of the forward context"
            )
        return context.backend.forward(
            q, k, v, spec, batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope
        )


def _by_head(argument: str, tensor: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """[T, heads, dim] of a tensor [..., heads, dim] or [..., heads * dim]."""
    if tensor.shape[-2:] != (heads, dim) and tensor.shape[-1:] != (heads * dim,):
        raise InvalidInput(
            argument,
            got=f"shape {tuple(tensor.shape)}",
            expected=f"[T, {heads}, {dim}] or [T, {heads * dim}]",
        )
    return tensor.reshape(-1, heads, dim)
