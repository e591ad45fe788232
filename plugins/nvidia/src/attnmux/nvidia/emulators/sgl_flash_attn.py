"""FlashAttention 3 as `sgl_kernel.flash_attn` offers it, in plain torch.

What the real functions do with their arguments, as far as an adapter can notice:

- Q is [B, Tq, Hq, D], or [total, Hq, D] with `cu_seqlens_q`; LSE is the natural logarithm, float32,
  [B, Hq, Tq] or [Hq, total].
- `causal`, the window and the chunk count positions from the end of a request's keys: its last
  query stands at its last key.
- A row without keys has output 0 and LSE -inf, sinks or not.
- Rows of Q that no request owns are not computed: `out` keeps what it held.
- Q, K and V are of one dtype. With float8_e4m3fn the output is bfloat16, the softmax's weights are
  rounded to float8_e4m3fn too, and the descales [B, Hkv] multiply.
- Without any keys, an empty K and V, LSE is +inf.
- `flash_attn_varlen_func` ignores `page_table`.
- K and V behind a request's end do not matter, whatever they hold. V before a window does where it
  is not finite: the kernel multiplies the whole block by weights of 0. Here every block counts.

Shapes are static and nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from attnmux.nvidia.emulators.dense import attend, padded, unpadded

_DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
_FP8_WEIGHTS = (torch.float8_e4m3fn, 256.0)
"""The kernel scales the weights by 2**8 before it rounds them, so that small ones survive."""

Descales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Result = torch.Tensor | tuple[torch.Tensor, ...]


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
    score_mod: Callable[..., object] | None = None,
    aux_tensors: Sequence[torch.Tensor] | None = None,
    ver: int = 3,
    out: torch.Tensor | None = None,
) -> Result:
    """Attention over a paged cache [pages, page, Hkv, D], or over [B, S, Hkv, D] without a table.

    Raises RuntimeError for what the library refuses, NotImplementedError for what it serves and
    the emulator does not: appending K and V, qv, scheduler metadata.
    """
    unserved = (k, v, qv, rotary_cos, cache_batch_idx, cache_leftpad, scheduler_metadata, score_mod)
    if any(argument is not None for argument in unserved) or only_qv:
        raise NotImplementedError("the emulator appends no K and V, and knows no qv")
    if not isinstance(cache_seqlens, torch.Tensor):
        raise NotImplementedError("the emulator takes a tensor of cache_seqlens")
    _check_int32("seqused_k", cache_seqlens)
    keys, values = k_cache, v_cache
    if page_table is not None:
        _check_int32("page_table", page_table)
        _check(k_cache.shape[:3] == v_cache.shape[:3], "v must have shape (num_pages, page_size …)")
        keys, values = _of_pages(k_cache, page_table), _of_pages(v_cache, page_table)
    if cu_seqlens_q is None:
        batched, q_lens = q, torch.full_like(cache_seqlens, q.shape[1])
    else:
        _check_int32("cu_seqlens_q", cu_seqlens_q)
        _check(max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is")
        batched, q_lens = padded(q, cu_seqlens_q, max_seqlen_q or 0), cu_seqlens_q.diff()
    call = _Call(
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window=(window_size[0], window_size[1]),
        chunk=attention_chunk or 0,
        softcap=softcap,
        sinks=sinks,
        descales=(q_descale, k_descale, v_descale),
    )
    return _run(
        call, q, batched, keys, values, q_lens, cache_seqlens, cu_seqlens_q, out, return_softmax_lse
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
    score_mod: Callable[..., object] | None = None,
    aux_tensors: Sequence[torch.Tensor] | None = None,
    ver: int = 3,
    out: torch.Tensor | None = None,
) -> Result:
    """Attention over packed keys [total_k, Hkv, D]; `page_table` is taken and not looked at.

    Raises RuntimeError and ValueError for what the library refuses, NotImplementedError for what
    it serves and the emulator does not.
    """
    if any(argument is not None for argument in (qv, seqused_q, seqused_k, score_mod)) or only_qv:
        raise NotImplementedError("the emulator knows no qv and no seqused")
    if max_seqlen_q is None or max_seqlen_k is None:
        raise ValueError("max_seqlen_q and max_seqlen_k are required for FA3")
    _check_int32("cu_seqlens_q", cu_seqlens_q)
    _check_int32("cu_seqlens_k", cu_seqlens_k)
    _check(cu_seqlens_k.shape == cu_seqlens_q.shape, "cu_seqlens_k must have shape (batch_size+1)")
    call = _Call(
        scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window=(window_size[0], window_size[1]),
        chunk=attention_chunk or 0,
        softcap=softcap,
        sinks=sinks,
        descales=(q_descale, k_descale, v_descale),
    )
    batched = padded(q, cu_seqlens_q, max_seqlen_q)
    keys, values = (padded(packed, cu_seqlens_k, max_seqlen_k) for packed in (k, v))
    q_lens, kv_lens = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    return _run(
        call, q, batched, keys, values, q_lens, kv_lens, cu_seqlens_q, out, return_softmax_lse
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Call:
    """What both functions say of the attention itself."""

    scale: float
    causal: bool
    window: tuple[int, int]
    chunk: int
    softcap: float
    sinks: torch.Tensor | None
    descales: Descales


def _run(
    call: _Call,
    q: torch.Tensor,
    batched: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    out: torch.Tensor | None,
    with_lse: bool,
) -> Result:
    """Q batched [B, Tq, …] over keys [B, S, …]; the result lies as q does."""
    is_fp8 = q.dtype == torch.float8_e4m3fn
    out_dtype = torch.bfloat16 if is_fp8 else q.dtype
    out_shape = (*q.shape[:-1], values.shape[-1])
    _check_operands(call, q, batched, keys, values)
    if not keys.shape[1]:
        out = torch.zeros(out_shape, dtype=out_dtype, device=q.device) if out is None else out
        # What the library answers for no keys at all, unlike for a request without.
        lse = torch.full(q.shape[:-1], torch.inf, device=q.device)
        lse = lse.transpose(-1, -2).contiguous()
        return (out.zero_(), lse) if with_lse else out.zero_()
    if out is not None:
        _check(out.dtype == out_dtype, "output must have the dtype of the inputs, for FP8 BF16")
        _check(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
        _check(out.shape == out_shape, f"out must have shape {out_shape}")
    q_factor, k_factor, v_factor = (
        _factor(descale, batched.shape[0], keys.shape[2], q.device, in_use=is_fp8)
        for descale in call.descales
    )
    in_range = torch.arange(keys.shape[1], device=q.device) < kv_lens.unsqueeze(1)
    keep = _visible(call, batched.shape[1], q_lens, kv_lens, in_range)
    behind = ~in_range[..., None, None]
    result, lse = attend(
        batched,
        keys.float().masked_fill(behind, 0),
        (values.float() * v_factor[:, None, :, None]).masked_fill(behind, 0),
        keep,
        scale=call.scale * (q_factor * k_factor)[..., None, None, None],
        softcap=call.softcap,
        sinks=call.sinks,
        rounded_weights=_FP8_WEIGHTS if is_fp8 else None,
    )
    lse = lse.masked_fill(~keep.any(-1, keepdim=True), -torch.inf)
    if out is None:
        out = torch.empty(out_shape, dtype=out_dtype, device=q.device)
    if cu_seqlens_q is None:
        out.copy_(result)
        lse = lse.transpose(1, 2).contiguous()
    else:
        out.copy_(unpadded(result, cu_seqlens_q, out))
        unowned = torch.full(q.shape[:2], torch.nan, device=q.device)
        lse = unpadded(lse, cu_seqlens_q, unowned).t().contiguous()
    return (out, lse, torch.empty(0), torch.empty(0)) if with_lse else out


def _visible(
    call: _Call,
    num_queries: int,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    in_range: torch.Tensor,
) -> torch.Tensor:
    """[B, Tq, S] bool."""
    left, right = call.window[0], 0 if call.causal else call.window[1]
    key = torch.arange(in_range.shape[1], device=q_lens.device)
    query = torch.arange(num_queries, device=q_lens.device)
    position = (query + (kv_lens - q_lens).unsqueeze(1)).unsqueeze(2)
    keep = in_range.unsqueeze(1) & (query < q_lens.unsqueeze(1)).unsqueeze(2)
    if left >= 0:
        keep = keep & (key >= position - left)
    if right >= 0:
        keep = keep & (key <= position + right)
    if call.chunk > 0:
        keep = keep & (key // call.chunk == position.div(call.chunk, rounding_mode="floor"))
    return keep


def _of_pages(cache: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """[B, pages * page, Hkv, D] of a paged cache; 8-bit floats are gathered as bytes."""
    stored = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    return stored[page_table.long()].flatten(1, 2).view(cache.dtype)


def _factor(
    descale: torch.Tensor | None,
    batch_size: int,
    kv_heads: int,
    device: torch.device,
    *,
    in_use: bool,
) -> torch.Tensor:
    """[B or 1, Hkv or 1]; other dtypes than FP8 do not look at it."""
    if descale is None or not in_use:
        return torch.ones(1, 1, device=device)
    _check(descale.dtype == torch.float32, "expected scalar type Float")
    _check(descale.shape == (batch_size, kv_heads), "descale must have shape (batch, num_heads_k)")
    return descale


def _check_operands(
    call: _Call, q: torch.Tensor, batched: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    head_dim, v_head_dim = q.shape[-1], values.shape[-1]
    _check(q.dtype in _DTYPES, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    _check(keys.dtype == q.dtype, "query and key must have the same dtype")
    _check(values.dtype == q.dtype, "query and value must have the same dtype")
    _check(keys.shape[0] == batched.shape[0], "batch_size must be equal to batch_size_k")
    _check(keys.shape[-1] == head_dim, "k must have the head_size of q")
    _check(head_dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    _check(q.shape[-2] % keys.shape[2] == 0, "Number of heads in key/value must divide query's")
    alignment = 16 if q.dtype == torch.float8_e4m3fn else 8
    _check(head_dim % alignment == 0, f"head_size should be a multiple of {alignment}")
    for operand in (q, keys, values):
        _check(operand.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    # The library does not look; its loads of 16 bytes fault.
    _check(q.data_ptr() % 16 == 0, "misaligned address")
    _check(all(step * q.itemsize % 16 == 0 for step in q.stride()[:-1]), "misaligned address")
    if head_dim != v_head_dim:
        wide = 128 < head_dim <= 192 and 96 < v_head_dim <= 128
        _check(
            wide or (head_dim <= 64 and v_head_dim <= 512), "V headdim is different from Q/K dim"
        )
    if call.sinks is not None:
        _check(call.sinks.dtype == torch.bfloat16, "sinks must have dtype bfloat16")
        _check(call.sinks.shape == (q.shape[-2],), "sinks must have shape (num_heads)")
        _check(call.sinks.is_contiguous(), "sinks must be contiguous")


def _check_int32(name: str, values: torch.Tensor) -> None:
    _check(values.dtype == torch.int32, f"{name} must have dtype torch.int32")
    _check(values.stride(-1) == 1, f"{name} must be contiguous")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)
