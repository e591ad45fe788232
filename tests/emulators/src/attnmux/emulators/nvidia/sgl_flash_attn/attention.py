"""The attention of both functions, and the checks of its operands."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.emulators.nvidia.dense import attend, padded, unpadded

DTYPES = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)

_SMALLEST_BLOCK = 64
"""Keys. Pages of whole blocks can be read without looking at a request's end."""
_FP8_WEIGHTS = (torch.float8_e4m3fn, 256.0)
"""The kernel scales the weights by 2**8 before it rounds them, so that small ones survive."""

Descales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """The arguments of the attention itself."""

    scale: float | None
    causal: bool
    window: tuple[int, int]
    chunk: int
    softcap: float
    sinks: torch.Tensor | None
    descales: Descales


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Queries:
    """Q as it was given, and by request."""

    q: torch.Tensor
    """[B, Tq, Hq, D] or [total, Hq, D]."""
    qv: torch.Tensor | None
    """Likewise, with V's dims."""
    bounds: torch.Tensor | None
    """[B + 1] int32 where Q is packed."""
    longest: int
    lens: torch.Tensor
    """[B] int32."""

    def batched(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, longest, Hq, …] of rows in the layout of q."""
        return rows if self.bounds is None else padded(rows, self.bounds, self.longest)


def run(
    call: Call,
    queries: Queries,
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_lens: torch.Tensor,
    loaded: torch.Tensor,
    out: torch.Tensor | None,
    with_lse: bool,
) -> Result:
    """Attend to keys and values [B, S, Hkv, …]; the result has the layout of q.

    loaded: [B], rows of V that are multiplied, by weights of 0 from kv_lens on.
    """
    q, device = queries.q, queries.q.device
    batched = queries.batched(q)
    is_fp8 = q.dtype == torch.float8_e4m3fn
    out_dtype = torch.bfloat16 if is_fp8 else q.dtype
    out_shape = (*q.shape[:-1], values.shape[-1])
    check_operands(q, queries.qv, batched.shape[0], keys, values, call.sinks)
    if not keys.shape[1]:
        out = torch.zeros(out_shape, dtype=out_dtype, device=device) if out is None else out
        # Where there are no keys at all; a request without keys has -inf.
        lse = torch.full(q.shape[:-1], torch.inf, device=device)
        lse = lse.transpose(-1, -2).contiguous()
        return (out.zero_(), lse) if with_lse else out.zero_()
    if out is not None:
        check(out.dtype == out_dtype, "output must have the dtype of the inputs, for FP8 BF16")
        check(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
        check(out.shape == out_shape, f"out must have shape {out_shape}")
    q_factor, k_factor, v_factor = (
        of_heads(descale, batched.shape[0], keys.shape[2], device, in_use=is_fp8)
        for descale in call.descales
    )
    order = torch.arange(keys.shape[1], device=device)
    in_range = order < kv_lens.unsqueeze(1)
    keep = _visible(call, batched.shape[1], queries.lens, kv_lens, in_range)
    keys = keys.float().masked_fill(~in_range[..., None, None], 0)
    unread = order >= torch.where(kv_lens > 0, loaded, 0).unsqueeze(1)
    values = (values.float() * v_factor[:, None, :, None]).masked_fill(unread[..., None, None], 0)
    if queries.qv is not None:
        batched = torch.cat([batched, queries.batched(queries.qv)], dim=-1)
        keys = torch.cat([keys, values], dim=-1)
    scale = batched.shape[-1] ** -0.5 if call.scale is None else call.scale
    result, lse = attend(
        batched,
        keys,
        values,
        keep,
        scale=scale * (q_factor * k_factor)[..., None, None, None],
        softcap=call.softcap,
        sinks=call.sinks,
        rounded_weights=_FP8_WEIGHTS if is_fp8 else None,
    )
    lse = lse.masked_fill(~keep.any(2).any(1)[:, None, None], -torch.inf)
    if out is None:
        out = torch.empty(out_shape, dtype=out_dtype, device=device)
    if queries.bounds is None:
        out.copy_(result)
        lse = lse.transpose(1, 2).contiguous()
    else:
        out.copy_(unpadded(result, queries.bounds, out))
        unowned = torch.full(q.shape[:2], torch.nan, device=device)
        lse = unpadded(lse, queries.bounds, unowned).t().contiguous()
    return (out, lse, torch.empty(0), torch.empty(0)) if with_lse else out


def _visible(
    call: Call,
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


def of_pages(cache: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """A paged cache as [B, pages * page, Hkv, D]; 8-bit floats are gathered as bytes."""
    stored = cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
    return stored[page_table.long()].flatten(1, 2).view(cache.dtype)


def loaded_of_pages(lens: torch.Tensor, page_size: int) -> torch.Tensor:
    """[B]: rows of V that the kernel reads for requests with that many keys."""
    if page_size < _SMALLEST_BLOCK:
        return lens
    return (lens + page_size - 1) // page_size * page_size


def of_heads(
    descale: torch.Tensor | None,
    batch_size: int,
    kv_heads: int,
    device: torch.device,
    *,
    in_use: bool,
) -> torch.Tensor:
    """[B or 1, Hkv or 1]: a descale; only FP8 uses it."""
    if descale is None or not in_use:
        return torch.ones(1, 1, device=device)
    check(descale.dtype == torch.float32, "expected scalar type Float")
    check(descale.shape == (batch_size, kv_heads), "descale must have shape (batch, num_heads_k)")
    return descale


def check_operands(
    q: torch.Tensor,
    qv: torch.Tensor | None,
    batch_size: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """q and qv: as given. keys and values: [B, S, Hkv, …]."""
    head_dim, v_head_dim = q.shape[-1], values.shape[-1]
    check(q.dtype in DTYPES, "FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    check(keys.dtype == q.dtype, "query and key must have the same dtype")
    check(values.dtype == q.dtype, "query and value must have the same dtype")
    check(keys.shape[0] == batch_size, "batch_size must be equal to batch_size_k")
    check(keys.shape[-1] == head_dim, "k must have the head_size of q")
    check(head_dim <= 256, "FlashAttention forward only supports head dimension at most 256")
    check(q.shape[-2] % keys.shape[2] == 0, "Number of heads in key/value must divide query's")
    is_fp8 = q.dtype == torch.float8_e4m3fn
    alignment = 16 if is_fp8 else 8
    check(head_dim % alignment == 0, f"head_size should be a multiple of {alignment}")
    check(v_head_dim % alignment == 0, f"head_size_v should be a multiple of {alignment}")
    for operand in (q, keys, values):
        check(operand.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    _check_aligned(q)
    if head_dim != v_head_dim:
        wide = 128 < head_dim <= 192 and 96 < v_head_dim <= 128
        check(wide or (head_dim <= 64 and v_head_dim <= 512), "V headdim is different from Q/K dim")
        check(v_head_dim <= 256 or not is_fp8, "HeaddimV > 256 requires fp16 and bf16 data type")
    if qv is not None:
        check(head_dim <= 64, "q_v is only supported for head_size <= 64")
        check(v_head_dim >= 256, "q_v is only supported for hdim_v >= 256")
        check(qv.dtype == q.dtype, "q_v must have the same dtype as query")
        check(qv.stride(-1) == 1, "q_v tensor must have contiguous last dimension")
        check(qv.shape == (*q.shape[:-1], v_head_dim), "q_v must have the shape of the output")
        _check_aligned(qv)
    if sinks is not None:
        check(sinks.dtype == torch.bfloat16, "sinks must have dtype bfloat16")
        check(sinks.shape == (q.shape[-2],), "sinks must have shape (num_heads)")
        check(sinks.is_contiguous(), "sinks must be contiguous")
        check(len(sinks) <= 64, "the library writes sinks behind the end of an array of 64")


def check_rows(rows: torch.Tensor) -> None:
    """K or V in memory: rows may be any whole number of loads apart."""
    check(rows.stride(-1) == 1, "Input tensor must have contiguous last dimension")
    _check_aligned(rows)


def check_splits(num_splits: int) -> None:
    check(num_splits <= 256, "num_splits > 256 not supported")


def check_int32(name: str, values: torch.Tensor) -> None:
    check(values.dtype == torch.int32, f"{name} must have dtype torch.int32")
    check(values.stride(-1) == 1, f"{name} must be contiguous")


def check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)


def _check_aligned(rows: torch.Tensor) -> None:
    """The library does not check; its loads of 16 bytes fault."""
    check(rows.data_ptr() % 16 == 0, "misaligned address")
    check(all(step * rows.itemsize % 16 == 0 for step in rows.stride()[:-1]), "misaligned address")
