"""Checks of a backend's arguments that cost no device synchronisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnmux.core.errors import InvalidInput
from attnmux.core.indices.args import check_picks

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.call import AttentionCall

_OF_REQUESTS = ("seq_lens", "extend_seq_lens", "extend_prefix_lens", "encoder_lens")
"""int32 fields of a batch with one value a request."""
_MIRRORS = ("seq_lens_cpu", "extend_seq_lens_cpu", "extend_prefix_lens_cpu")
"""The same on the host."""


def check_fields(batch: ForwardBatch) -> None:
    """Raise InvalidInput for a batch whose fields are not of the dtypes and shapes it documents."""
    size = batch.batch_size
    _check_vector("req_pool_indices", batch.req_pool_indices, torch.int64, size)
    _check_vector("out_cache_loc", batch.out_cache_loc, torch.int64, batch.num_tokens)
    _check_vector("positions", batch.positions, torch.int64, batch.num_tokens)
    _check_vector("encoder_out_cache_loc", batch.encoder_out_cache_loc, torch.int64)
    for field in _OF_REQUESTS:
        values = getattr(batch, field)
        if values is not None:
            _check_vector(field, values, torch.int32, size)
    for field in _MIRRORS:
        mirror = getattr(batch, field)
        if mirror is not None:
            _check_vector(field, mirror, torch.int32, size)
            if not mirror.is_cpu:
                raise InvalidInput(
                    field, came=f"a tensor on {mirror.device}", expected="one on cpu"
                )
    if batch.topk_indices is not None:
        check_picks(batch.topk_indices, batch.num_tokens)
    items = batch.multi_item
    if items is not None:
        _check_vector("multi_item.prefix_lens", items.prefix_lens, torch.int32, size)
        _check_vector("multi_item.token_pos_in_items", items.token_pos_in_items, torch.int32)


def check_call(call: AttentionCall, batch: ForwardBatch, *, dtype: torch.dtype | None) -> None:
    """Raise InvalidInput unless the tensors of a layer's call fit the layer and the batch.

    dtype: the decided dtype of Q, if there is one.
    """
    q, layer = call.q, call.layer
    num_tokens, heads = batch.num_tokens, layer.tp_q_head_num
    rope_dim = layer.qk_rope_head_dim
    dtype, device = dtype or q.dtype, q.device
    _check("q", q, (num_tokens, heads, layer.query_dim), device, dtype)
    if rope_dim:
        _check("q_rope", call.q_rope, (num_tokens, heads, rope_dim), device, dtype)
    else:
        _check_absent("q_rope", call.q_rope, "the layer is not MLA")
    _check_new_kv(call, num_tokens, device)
    if call.out is not None:
        _check("out", call.out, (num_tokens, heads, layer.v_head_dim), device, dtype)
    if call.lse is not None:
        _check("lse", call.lse, (num_tokens, heads), device, torch.float32)


def _check_new_kv(call: AttentionCall, num_tokens: int, device: torch.device) -> None:
    k, v, k_rope, layer = call.k, call.v, call.k_rope, call.layer
    if k is None:
        _check_absent("v", v, "k is None: both are in the pool, or neither")
        _check_absent("k_rope", k_rope, "k is None: both are in the pool, or neither")
        return
    rope_dim = layer.qk_rope_head_dim
    keys = num_tokens
    if layer.is_cross_attention and k.dim():
        keys = k.shape[0]
    _check("k", k, (keys, layer.tp_k_head_num, layer.qk_head_dim - rope_dim), device)
    if rope_dim:
        _check("k_rope", k_rope, (keys, 1, rope_dim), device)
        _check_absent("v", v, "MLA's V is the latent part of K")
    else:
        _check("v", v, (keys, layer.tp_v_head_num, layer.v_head_dim), device)
        _check_absent("k_rope", k_rope, "the layer is not MLA")


def _check(
    argument: str,
    tensor: torch.Tensor | None,
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> None:
    if tensor is None:
        raise InvalidInput(argument, came=None, expected=f"shape {shape}")
    if tensor.shape != shape:
        raise InvalidInput(argument, came=f"shape {tuple(tensor.shape)}", expected=f"shape {shape}")
    if dtype is not None and tensor.dtype != dtype:
        raise InvalidInput(argument, came=tensor.dtype, expected=str(dtype))
    if tensor.device != device:
        raise InvalidInput(
            argument, came=f"a tensor on {tensor.device}", expected=f"one on {device}, as q is"
        )


def _check_absent(argument: str, tensor: torch.Tensor | None, reason: str) -> None:
    if tensor is not None:
        raise InvalidInput(argument, came="a tensor", expected=f"None, since {reason}")


def _check_vector(
    field: str, values: torch.Tensor | None, dtype: torch.dtype, length: int | None = None
) -> None:
    """A vector of that dtype and, where one is given, that length; None is no vector."""
    if values is None:
        return
    if values.dtype != dtype or values.dim() != 1 or length not in (None, values.shape[0]):
        raise InvalidInput(
            field,
            came=f"{values.dtype} of shape {tuple(values.shape)}",
            expected=f"{dtype} of shape ({'n' if length is None else length},)",
        )
