"""The steps that every engine takes, gone through without a launch: what to compile ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.dtypes import torch_dtype

if TYPE_CHECKING:
    from attnmux.core.context import BackendContext
    from attnmux.core.layer import LayerSpec
    from attnmux.triton.backend import TritonBackend


def rehearse(backend: TritonBackend, context: BackendContext) -> None:
    """Every layer's decode and extend, at each batch size that plans are compiled for.

    Not what a later request may bring: LSE, masks, items, or more tokens a request in verification.
    """
    is_encoder = not context.layers[0].is_causal
    modes = (ForwardMode.EXTEND,) if is_encoder else (ForwardMode.DECODE, ForwardMode.EXTEND)
    for mode in modes:
        for size in _batch_sizes(context.max_batch_size):
            batch = _batch(mode, size, context)
            backend.init_forward_metadata_out_graph(batch)
            backend.init_forward_metadata_in_graph(batch)
            # What merges the parts of a step's requests is launched by how many those are.
            if size == 1 or mode is ForwardMode.DECODE:
                for layer in context.layers:
                    _call(backend, layer, batch, context)
    # So that no step is prepared.
    backend.init_forward_metadata_out_graph(_batch(ForwardMode.IDLE, 1, context))


def _batch_sizes(most: int) -> list[int]:
    """The powers of 2, and the most: kernels that ask for the batch's size ask for a power of 2."""
    return sorted({most, *(1 << exponent for exponent in range(most.bit_length()))})


def _batch(mode: ForwardMode, size: int, context: BackendContext) -> ForwardBatch:
    """Of one token a request, in the rows and slots that are reserved for padding."""

    def zeros(dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=context.device)

    has_encoder = any(layer.is_cross_attention for layer in context.layers)
    extends = mode is ForwardMode.EXTEND
    ones = zeros(torch.int32) + 1
    return ForwardBatch(
        forward_mode=mode,
        batch_size=size,
        req_pool_indices=zeros(torch.int64),
        seq_lens=ones,
        out_cache_loc=zeros(torch.int64),
        positions=zeros(torch.int64),
        extend_seq_lens=ones if extends else None,
        extend_prefix_lens=zeros(torch.int32) if extends else None,
        extend_num_tokens=size if extends else None,
        encoder_lens=ones if has_encoder else None,
        encoder_out_cache_loc=zeros(torch.int64) if has_encoder else None,
    )


def _call(
    backend: TritonBackend, layer: LayerSpec, batch: ForwardBatch, context: BackendContext
) -> None:
    pool = context.token_to_kv_pool
    dtype = torch.bfloat16 if context.request.dtype is None else torch_dtype(context.request.dtype)

    def rows(heads: int, width: int) -> torch.Tensor:
        return torch.zeros((batch.batch_size, heads, width), dtype=dtype, device=context.device)

    rope = layer.qk_rope_head_dim
    q = rows(layer.tp_q_head_num, layer.qk_head_dim - rope)
    k = rows(layer.tp_k_head_num, layer.qk_head_dim - rope)
    v = None if rope else rows(layer.tp_v_head_num, layer.v_head_dim)
    q_rope = rows(layer.tp_q_head_num, rope) if rope else None
    k_rope = rows(1, rope) if rope else None
    is_stored = layer.is_causal and layer.layer_id in pool.layer_ids
    if is_stored:
        backend.save_kv(k, v, layer, batch, k_rope=k_rope)
    call = AttentionCall(q, k, v, layer, is_stored, q_rope, k_rope)
    if not batch.forward_mode.is_decode():
        backend.forward_extend(call, batch)
    elif is_stored:
        backend.forward_decode(call, batch)
