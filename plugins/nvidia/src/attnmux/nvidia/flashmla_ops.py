"""FlashMLA by the operators of vLLM's build (vllm/third_party/flashmla and csrc of vLLM 0.33).

For 16-bit caches the first call of a step makes its schedule, as upstream FlashMLA does: the next
layers get it. For e4m3 a function makes it ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from attnmux.nvidia.flashmla import FlashMLAKernels
from attnmux.nvidia.nsa import NSAKernels
from attnmux.nvidia.vllm_files import load_operators

Operator = Callable[..., Any]


@dataclass(slots=True, eq=False)
class Schedule:
    """What a step's layers share. Empty until it is made."""

    tiles: torch.Tensor | None = None
    splits: torch.Tensor | None = None


def flashmla_of_vllm(
    dense_decode: Operator, decode_fp8: Operator, schedule_fp8: Operator
) -> FlashMLAKernels:
    """The kernels of vLLM's operators `dense_decode_fwd`, `fwd_kvcache_mla_fp8` and
    `get_mla_decoding_metadata_dense_fp8`."""

    def schedule(lens: torch.Tensor, num_rows: int, is_fp8: bool) -> Sequence[torch.Tensor]:
        return tuple(schedule_fp8(lens, num_rows, 1)) if is_fp8 else ()

    def arguments(*tensors: torch.Tensor) -> dict[str, Any]:
        return {"schedule": Schedule(*tensors)}

    def decode(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        head_dim_v: int,
        *,
        schedule: Schedule,
        softmax_scale: float,
        causal: bool,
        is_fp8_kvcache: bool,
        descale_q: torch.Tensor | None = None,
        descale_k: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        operands = (q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal)
        made = schedule.tiles, schedule.splits
        if is_fp8_kvcache:
            out, lse = decode_fp8(*operands, *made, descale_q, descale_k)
            return out, lse
        out, lse, schedule.tiles, schedule.splits = dense_decode(*operands, *made, None)
        return out, lse

    return FlashMLAKernels(
        flash_mla_with_kvcache=decode,
        schedule=schedule,
        schedule_arguments=arguments,
        constants=MappingProxyType({}),
    )


def sparse_of_vllm(sparse_prefill: Operator) -> NSAKernels:
    """The kernel of vLLM's operator `sparse_prefill_fwd`."""

    def attend(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, most, lse = sparse_prefill(q, kv, indices, sm_scale, d_v, None, None, None)
        return out, most, lse

    return NSAKernels(flash_mla_sparse_fwd=attend, constants=MappingProxyType({}))


def dense_from_vllm() -> FlashMLAKernels:
    """vLLM's build. Raises ImportError if vLLM is not installed or has none."""
    operators = load_operators("_flashmla_C", "dense_decode_fwd", "_flashmla_C")
    of_fp8 = load_operators("_flashmla_extension_C", "fwd_kvcache_mla_fp8", "_flashmla_extension_C")
    return flashmla_of_vllm(
        operators.dense_decode_fwd.default,
        of_fp8.fwd_kvcache_mla_fp8.default,
        of_fp8.get_mla_decoding_metadata_dense_fp8.default,
    )


def sparse_from_vllm() -> NSAKernels:
    """vLLM's build. Raises ImportError if vLLM is not installed or has none."""
    operators = load_operators("_flashmla_C", "sparse_prefill_fwd", "_flashmla_C")
    return sparse_of_vllm(operators.sparse_prefill_fwd.default)
