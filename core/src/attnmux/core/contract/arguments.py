"""Checks of arguments that cost no device synchronisation. `debug.py` has those that cost one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.call import AttentionCall
from attnmux.core.contract.spec import SpecInput
from attnmux.core.facts.errors import AttnmuxError, InvalidInput

_LENS = ("seq_lens", "extend_seq_lens", "extend_prefix_lens", "encoder_lens")
"""Fields of a batch that hold one int32 for each request."""
_REQUIRED = ("req_pool_indices", "seq_lens", "out_cache_loc", "positions")
_MIRRORS = ("seq_lens_cpu", "extend_seq_lens_cpu", "extend_prefix_lens_cpu")
"""Their copies on the host."""


def described(tensor: torch.Tensor) -> str:
    """Dtype and shape, as error messages give them."""
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


def check_whole_pages(size: int, page_size: int) -> None:
    """Raise InvalidInput unless `size` tokens fill one or more pages completely."""
    InvalidInput.check_at_least(1, "page_size", page_size)
    if size < page_size or size % page_size:
        raise InvalidInput(
            "size", got=f"{size} tokens", expected=f"whole pages of {page_size} tokens"
        )


def check_vector(
    argument: str, values: torch.Tensor, dtype: torch.dtype, length: int | None = None
) -> int:
    """The length of a vector. Raises InvalidInput for another dtype, number of dims or length."""
    if values.dtype != dtype or values.dim() != 1 or length not in (None, values.shape[0]):
        raise InvalidInput(
            argument,
            got=described(values),
            expected=f"{dtype} of shape ({'n' if length is None else length},)",
        )
    return values.shape[0]


def check_lens(argument: str, lens: torch.Tensor, batch_size: int | None = None) -> int:
    """The batch size. Raises InvalidInput unless lens is int32 [B]."""
    return check_vector(argument, lens, torch.int32, batch_size)


def check_table(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor) -> int:
    """The batch size. Raises InvalidInput unless the table is contiguous int32
    [rows, max_context] and its row numbers are int64 [B]."""
    table = req_to_token
    if table.dtype != torch.int32 or table.dim() != 2 or not table.is_contiguous():
        raise InvalidInput(
            "req_to_token", got=described(table), expected="contiguous int32 [rows, max_context]"
        )
    return check_vector("req_pool_indices", req_pool_indices, torch.int64)


def check_picks(topk_indices: torch.Tensor, num_tokens: int) -> None:
    """Raise InvalidInput unless topk_indices is int32 [num_tokens, topk]."""
    _check_picks(topk_indices, (num_tokens, "topk"))


def check_picked_blocks(topk_indices: torch.Tensor, num_tokens: int) -> None:
    """Raise InvalidInput unless topk_indices is int32 [num_tokens, heads, topk]."""
    _check_picks(topk_indices, (num_tokens, "heads", "topk"))


def _check_picks(picks: torch.Tensor, shape: tuple[int | str, ...]) -> None:
    if picks.dtype != torch.int32 or picks.dim() != len(shape) or picks.shape[0] != shape[0]:
        expected = f"torch.int32 of shape ({', '.join(map(str, shape))})"
        raise InvalidInput("topk_indices", got=described(picks), expected=expected)


def front(
    out: torch.Tensor | None, length: int, like: torch.Tensor, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """The first `length` values of out, or a new vector on the device of `like`.

    Raises InvalidInput for a buffer of another dtype or one that is too short.
    """
    if out is None:
        return torch.empty(length, dtype=dtype, device=like.device)
    if out.dtype != dtype or out.dim() != 1 or out.shape[0] < length:
        raise InvalidInput(
            "out", got=described(out), expected=f"{dtype} of at least {length} values"
        )
    return out[:length]


def check_fields(batch: ForwardBatch) -> None:
    """Raise InvalidInput for a batch whose fields lack the dtypes and shapes that
    `ForwardBatch` documents."""
    for field in _REQUIRED:
        value = getattr(batch, field)
        if value is None or value.dim() != 1:
            got = None if value is None else described(value)
            raise InvalidInput(field, got=got, expected="a tensor of shape (n,)")
    size, num_tokens = batch.batch_size, batch.num_tokens
    check_vector("req_pool_indices", batch.req_pool_indices, torch.int64, size)
    _check_tokens(batch, num_tokens)
    if batch.encoder_out_cache_loc is not None:
        check_vector("encoder_out_cache_loc", batch.encoder_out_cache_loc, torch.int64)
    for field in (*_LENS, *_MIRRORS):
        lens = getattr(batch, field)
        if lens is not None:
            check_lens(field, lens, size)
            if field in _MIRRORS:
                check_device(field, lens, torch.device("cpu"))
    if batch.topk_indices is not None:
        of_blocks = batch.topk_indices.dim() == 3
        (check_picked_blocks if of_blocks else check_picks)(batch.topk_indices, num_tokens)
    if batch.multi_item is not None:
        check_lens("multi_item.prefix_lens", batch.multi_item.prefix_lens, size)
        check_lens("multi_item.token_pos_in_items", batch.multi_item.token_pos_in_items)
    if batch.spec_info is not None:
        _check_visible(batch, batch.spec_info)


def _check_tokens(batch: ForwardBatch, num_tokens: int) -> None:
    """Raise InvalidInput unless each new token has a slot and a place, and each decoding request
    one new token."""
    check_vector("out_cache_loc", batch.out_cache_loc, torch.int64, num_tokens)
    if batch.forward_mode.is_decode() and num_tokens != batch.batch_size:
        got, expected = f"{num_tokens} slots", f"{batch.batch_size}, one a decoding request"
        raise InvalidInput("out_cache_loc", got=got, expected=expected)
    check_vector("positions", batch.positions, torch.int64, num_tokens)


def _check_visible(batch: ForwardBatch, spec: SpecInput) -> None:
    """Raise InvalidInput for several masks, and for masks between drafts of other shapes, dtypes or
    devices, or in another mode than TARGET_VERIFY."""
    masks = {
        "custom_mask": spec.custom_mask,
        "visible": spec.visible,
        "visible_bits": spec.visible_bits,
    }
    forms = [name for name, mask in masks.items() if mask is not None]
    if len(forms) > 1:
        raise InvalidInput("spec_info", got=" and ".join(forms), expected="one of them")
    drafts = spec.draft_token_num
    for name, width, dtype in (
        ("visible", drafts, torch.bool),
        ("visible_bits", -(-drafts // 8), torch.uint8),
    ):
        mask, field = masks[name], f"spec_info.{name}"
        if mask is None:
            continue
        if not batch.forward_mode.is_target_verify():
            got = batch.forward_mode.name
            raise InvalidInput(field, got=f"a mask in {got}", expected="one only in TARGET_VERIFY")
        shape = (batch.batch_size, drafts, width)
        if mask.shape != shape or mask.dtype != dtype:
            raise InvalidInput(field, got=described(mask), expected=f"{dtype} of shape {shape}")
        check_device(field, mask, batch.seq_lens.device)


def check_call(call: AttentionCall, batch: ForwardBatch, *, dtype: torch.dtype | None) -> None:
    """Raise InvalidInput unless the tensors of a layer's call fit the layer and the batch.

    dtype: the decided dtype of Q; None accepts any.
    """
    q, layer = call.q, call.layer
    num_tokens, heads = batch.num_tokens, layer.tp_q_head_num
    rope_dim = layer.qk_rope_head_dim
    dtype, device = dtype or q.dtype, q.device
    shape = (num_tokens, heads, layer.query_dim)
    # Each layer of each step comes here, with cold caches: no call if all is well
    if q.shape != shape or q.dtype is not dtype:
        check_tensor("q", q, shape, device, dtype)
    if rope_dim:
        check_tensor("q_rope", call.q_rope, (num_tokens, heads, rope_dim), device, dtype)
    elif call.q_rope is not None:
        _check_absent("q_rope", call.q_rope, "the layer is not MLA")
    _check_new_kv(call, num_tokens, device)
    out, shape = call.out, (num_tokens, heads, layer.v_head_dim)
    if out is not None and (out.shape != shape or out.dtype is not dtype or out.device != device):
        check_tensor("out", out, shape, device, dtype)
    if call.lse is not None:
        check_tensor("lse", call.lse, (num_tokens, heads), device, torch.float32)


def check_result(result: torch.Tensor, call: AttentionCall, backend: str) -> None:
    """Raise AttnmuxError unless a backend's result is [T, Hq, Dv] with Q's dtype and device."""
    q, layer = call.q, call.layer
    shape = (q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
    if not isinstance(result, torch.Tensor):
        got = f"{type(result).__name__} instead of a tensor"
    elif result.shape == shape and result.dtype is q.dtype and result.device == q.device:
        return
    else:
        got = f"{described(result)} on {result.device}"
    raise AttnmuxError(
        f"{backend} returned {got}; expected {q.dtype} of shape {shape} on {q.device}"
    )


def _check_new_kv(call: AttentionCall, num_tokens: int, device: torch.device) -> None:
    k, v, k_rope, layer = call.k, call.v, call.k_rope, call.layer
    if k is None:
        _check_absent("v", v, "k is None: the pool holds both or neither")
        _check_absent("k_rope", k_rope, "k is None: the pool holds both or neither")
        return
    rope_dim = layer.qk_rope_head_dim
    keys = k.shape[0] if layer.is_cross_attention and k.dim() else num_tokens
    shape = (keys, layer.tp_k_head_num, layer.qk_head_dim - rope_dim)
    if k.shape != shape or k.device != device:
        check_tensor("k", k, shape, device)
    if rope_dim:
        check_tensor("k_rope", k_rope, (keys, 1, rope_dim), device)
        _check_absent("v", v, "MLA's V is the latent part of K")
    else:
        shape = (keys, layer.tp_v_head_num, layer.v_head_dim)
        if v is None or v.shape != shape or v.device != device:
            check_tensor("v", v, shape, device)
        if k_rope is not None:
            _check_absent("k_rope", k_rope, "the layer is not MLA")


def check_tensor(
    argument: str,
    tensor: torch.Tensor | None,
    shape: Sequence[int | str],
    device: torch.device | None = None,
    *dtypes: torch.dtype,
) -> None:
    """Raise InvalidInput unless there is a tensor of that shape and device and one of the dtypes.

    shape: a word, such as "T", is a dim of any size. Without device or dtypes any are accepted.
    """
    if tensor is None:
        raise InvalidInput(argument, got=None, expected=f"shape {_shape_said(shape)}")
    if tensor.shape != shape and not _fits(tensor.shape, shape):
        got = f"shape {tuple(tensor.shape)}"
        raise InvalidInput(argument, got=got, expected=f"shape {_shape_said(shape)}")
    if dtypes and tensor.dtype not in dtypes:
        *most, last = (str(dtype) for dtype in dtypes)
        expected = f"{', '.join(most)} or {last}" if most else last
        raise InvalidInput(argument, got=tensor.dtype, expected=expected)
    # Each layer of each step comes here: no call if all is well
    if device is not None and tensor.device != device:
        check_device(argument, tensor, device)


def _fits(shape: torch.Size, wanted: Sequence[int | str]) -> bool:
    sizes = zip(shape, wanted, strict=False)
    return len(shape) == len(wanted) and all(isinstance(w, str) or w == n for n, w in sizes)


def _shape_said(shape: Sequence[int | str]) -> str:
    return str(tuple(shape)).replace("'", "")


def check_device(argument: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise InvalidInput for a tensor on another device."""
    if tensor.device != device:
        got = f"a tensor on {tensor.device}"
        raise InvalidInput(argument, got=got, expected=f"one on {device}")


def _check_absent(argument: str, tensor: torch.Tensor | None, reason: str) -> None:
    if tensor is not None:
        raise InvalidInput(argument, got="a tensor", expected=f"None, since {reason}")
