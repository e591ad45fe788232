"""The attention behind both functions."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.emulators.nvidia.dense import attend, padded, unpadded
from attnmux.emulators.nvidia.sgl_flash_attn.operands import check, check_operands, of_heads

_FP8_WEIGHTS = (torch.float8_e4m3fn, 256.0)
"""The kernel scales the weights by 2**8 before it rounds them, so that small ones survive."""

Descales = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Result = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """What both functions say of the attention itself."""

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
    """The same of V's dims."""
    bounds: torch.Tensor | None
    """[B + 1] int32 of packed ones."""
    longest: int
    lens: torch.Tensor
    """[B] int32."""

    def batched(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, longest, Hq, …] of rows that lie as q does."""
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
    """Over keys and values [B, S, Hkv, …]; the result lies as q does.

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
        # What the library answers for no keys at all, unlike for a request without.
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
