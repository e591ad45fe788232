"""flashinfer 0.7.2's MLA decode by TensorRT-LLM's kernels: trtllm-gen of SM100, XQA of SM120.

trtllm-gen is causal from the end over the queries of a request and clears its counters before it
runs. XQA takes one query a request, 128 heads, and multiplies logits by both scales. Both load
whole tiles of keys.
"""

from __future__ import annotations

import torch

from attnmux.emulators.nvidia.dense import attend
from attnmux.emulators.nvidia.flashinfer.arguments import refuse, refuse_unusual
from attnmux.emulators.nvidia.flashinfer.trtllm_memory import (
    COUNTER_BYTES,
    E4M3,
    int32,
    paged,
    raw,
    spoiled,
    visible,
)

TILE = 128
"""Keys: a table's rows hold whole tiles."""


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: list[torch.Tensor] | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    enable_pdl: bool | None = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: torch.Tensor | None = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: object = "auto",
    cum_seq_lens_q: object = None,
    max_q_len: object = None,
    multi_ctas_kv_counter_buffer: object = None,
    sparse_mla_top_k_lens: object = None,
    enable_dcp: object = False,
    cp_world: object = 1,
    cp_rank: object = 0,
    causal_seqlens_kv_global: object = None,
    use_fp16_softmax: object = None,
    return_lse_base: object = None,
) -> torch.Tensor:
    """MLA decode as on SM100."""
    refuse_unusual(
        (kv_scale_format, "auto"),
        (cum_seq_lens_q, None),
        (max_q_len, None),
        (multi_ctas_kv_counter_buffer, None),
        (sparse_mla_top_k_lens, None),
        (enable_dcp, False),
        (cp_world, 1),
        (cp_rank, 0),
        (causal_seqlens_kv_global, None),
        (use_fp16_softmax, None),
        (return_lse_base, None),
    )
    refuse(sinks, skip_softmax_threshold_scale_factor, lse, return_lse or None)
    refuse(sparse_mla_top_k or None, None if uses_shared_paged_kv_idx else False)
    if backend not in ("auto", "trtllm-gen"):
        raise ValueError(f"Backend {backend} not supported")
    rows = _rows(query, kv_cache, block_tables, kv_lora_rank, qk_rope_head_dim)
    num_heads = query.shape[2]
    if query.dtype != kv_cache.dtype or 64 < num_heads < 128 or rows.shape[1] not in (32, 64):
        raise RuntimeError("Missing TRTLLM-GEN kernel")
    shape = (*query.shape[:-1], kv_lora_rank)
    out = _output(out, shape, query.device)
    workspace_buffer.view(torch.uint8)[:COUNTER_BYTES].zero_()
    lens = int32("seq_lens", seq_lens)
    result = _attend(
        query,
        rows,
        int32("block_tables", block_tables),
        lens,
        kv_lora_rank,
        scales=(float(bmm1_scale), float(bmm2_scale)),
        max_seq_len=max_seq_len,
        workspace=workspace_buffer,
    )
    raw(out).copy_(result)
    return out


def xqa_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    out: torch.Tensor | None = None,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    sinks: list[torch.Tensor] | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """MLA decode as on SM120."""
    if query.shape[1] != 1:
        raise ValueError(f"XQA MLA only supports q_len_per_request == 1, got {query.shape[1]}")
    if query.dtype != kv_cache.dtype or query.dtype not in (torch.bfloat16, E4M3):
        raise ValueError(f"XQA MLA supports (fp8, fp8) or (bfloat16, bfloat16) only: {query.dtype}")
    if sinks is not None:
        raise ValueError("XQA MLA does not support sinks")
    rows = _rows(query, kv_cache, block_tables, kv_lora_rank, qk_rope_head_dim)
    out = _output(out, (len(query), query.shape[2], kv_lora_rank), query.device)
    if query.shape[2] != 128:
        raise ValueError(f"XQA MLA only supports 128 query heads, got {query.shape[2]}")
    result = _attend(
        raw(query),
        rows,
        int32("block_tables", block_tables),
        int32("seq_lens", seq_lens),
        kv_lora_rank,
        scales=(float(bmm1_scale) * float(bmm2_scale), float(bmm2_scale)),
        max_seq_len=block_tables.shape[1] * rows.shape[1],
        workspace=workspace_buffer,
    )
    raw(out).copy_(result.view(out.shape))
    return out


def _rows(
    query: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, rank: int, rope: int
) -> torch.Tensor:
    """[pages, page, 1, rank + rope] of a cache with or without a dim for its one head."""
    if query.dim() != 4:
        raise ValueError(f"Expected query.ndim == 4, got {query.dim()}")
    if kv_cache.dim() not in (3, 4):
        raise ValueError(f"Expected kv_cache.ndim == 3 or 4, got {kv_cache.dim()}")
    if (rank, rope) != (512, 64):
        raise ValueError(f"Unsupported MLA dimensions, got {rank} and {rope}")
    rows = (kv_cache.squeeze(1) if kv_cache.dim() == 4 else kv_cache).unsqueeze(2)
    if query.shape[-1] != rank + rope or rows.shape[-1] != rank + rope:
        raise ValueError(f"Expected head dim {rank + rope} for query and kv_cache")
    if block_tables.dim() != 2 or len(block_tables) != len(query):
        raise ValueError(f"Expected batch size {len(query)} for query and block_table")
    if block_tables.shape[1] % (TILE / rows.shape[1]):
        raise ValueError("Expected block_num % (128 / block_size) == 0")
    return rows


def _output(out: torch.Tensor | None, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)
    if tuple(out.shape) != shape or out.dtype != torch.bfloat16:
        raise ValueError(f"out: {out.dtype} {tuple(out.shape)}, expected bfloat16 {shape}")
    return out


def _attend(
    query: torch.Tensor,
    rows: torch.Tensor,
    tables: torch.Tensor,
    lens: torch.Tensor,
    rank: int,
    *,
    scales: tuple[float, float],
    max_seq_len: int,
    workspace: torch.Tensor,
) -> torch.Tensor:
    each = query.shape[1]
    keys, there = paged(rows, tables, lens, tile=TILE)
    there = there & (torch.arange(there.shape[1], device=there.device) < max_seq_len)
    keep = visible(there, each, torch.full_like(lens, each), lens, -1)
    result, _ = attend(
        query,
        keys,
        keys[..., :rank] * scales[1],
        keep,
        scale=scales[0],
        rounded_weights=(E4M3, 448.0) if query.dtype == E4M3 else None,
    )
    return spoiled(result, keep, workspace, len(lens) * query.shape[2])
