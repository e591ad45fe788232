"""FlashAttention 3 by its operators, in builds that are not `sgl_kernel`'s.

vLLM and FlashAttention itself carry the same kernels behind operators of almost one signature:
vLLM's takes sinks and no attention chunks, FlashAttention's chunks and no sinks
(hopper/flash_api.cpp of vllm-project/flash-attention, flash_api_stable.cpp of
Dao-AILab/flash-attention). The functions here have the signatures of `sgl_kernel.flash_attn`, as
far as the backends use them. Layouts, LSE and schedules are those of `sgl_kernel`.

`torch.nn.attention.activate_flash_attention_impl("FA3")` is no build of its own: it registers the
operators of `flash_attn_interface` for torch's own attention, without caps, `qv` and schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from attnmux.nvidia.fa3.layers import CHUNKS, SINKS, SINKS_OF_MIXED_DIMS, FA3Kernels
from attnmux.nvidia.vllm_files import load_operators

Window = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class FA3Operators:
    """A build's operators, called as the backends call `sgl_kernel.flash_attn`."""

    fwd: Callable[..., Sequence[torch.Tensor]]
    scheduler_metadata: Callable[..., torch.Tensor]
    takes_chunks: bool
    """Whether they take `attention_chunk`, after the window."""
    takes_sinks: bool
    """Whether `fwd` takes sinks and context parallelism, at its end."""

    def kernels(self, lacks: frozenset[str]) -> FA3Kernels:
        """lacks: as `FA3Kernels.lacks`."""
        return FA3Kernels(
            flash_attn_with_kvcache=self.flash_attn_with_kvcache,
            flash_attn_varlen_func=self.flash_attn_varlen_func,
            merge_state_v2=merge_state_v2,
            get_scheduler_metadata=self.get_scheduler_metadata,
            lacks=lacks,
        )

    def flash_attn_with_kvcache(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        page_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor | None = None,
        max_seqlen_q: int | None = None,
        **rest: Any,  # noqa: ANN401  # of `_forward`
    ) -> Any:  # noqa: ANN401  # a tuple with LSE
        """Attention over pages; q is [B, Tq, Hq, D], or [T, Hq, D] with `cu_seqlens_q`."""
        lens = (cu_seqlens_q, None, None, None, cache_seqlens, max_seqlen_q, None)
        return self._forward((q, k_cache, v_cache), lens, page_table, **rest)

    def flash_attn_varlen_func(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **rest: Any,  # noqa: ANN401  # of `_forward`
    ) -> Any:  # noqa: ANN401  # a tuple with LSE
        """Attention over packed K and V."""
        lens = (cu_seqlens_q, cu_seqlens_k, None, None, None, max_seqlen_q, max_seqlen_k)
        return self._forward((q, k, v), lens, None, **rest)

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads: int,
        num_heads_k: int,
        headdim: int,
        cache_seqlens: torch.Tensor,
        *,
        qkv_dtype: torch.dtype,
        headdim_v: int,
        page_size: int,
        causal: bool,
        window_size: Window,
        attention_chunk: int,
        has_softcap: bool,
        num_splits: int,
    ) -> torch.Tensor:
        return self.scheduler_metadata(
            *(batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v),
            *(qkv_dtype, cache_seqlens, None, None, None, None, None, page_size, 0, causal),
            *window_size,
            *((attention_chunk,) if self.takes_chunks else ()),
            *(has_softcap, num_splits, None, 0),
        )

    def _forward(
        self,
        operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        lens: tuple[object, ...],
        page_table: torch.Tensor | None,
        *,
        softmax_scale: float,
        qv: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        causal: bool = False,
        window_size: Window = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        scheduler_metadata: torch.Tensor | None = None,
        num_splits: int = 0,
        return_softmax_lse: bool = False,
        sinks: torch.Tensor | None = None,
    ) -> Any:  # noqa: ANN401  # a tuple with LSE
        result = self.fwd(
            *operands,
            *(None, None, qv, out, *lens, page_table),
            # Rows of the cache, padding on the left, rotary tables, and the factor of Q: none.
            *(None, None, None, None, None, None),
            *(k_descale, v_descale, softmax_scale, causal, *window_size),
            *((attention_chunk,) if self.takes_chunks else ()),
            *(softcap, True, scheduler_metadata, num_splits, None, 0),
            *((sinks, 1, 0, None) if self.takes_sinks else ()),
        )
        return tuple(result) if return_softmax_lse else result[0]


def merge_state_v2(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    v_merged: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two sets of keys, at least one of them not empty, as attention over both.

    v_a, v_b: [T, H, D]. s_a, s_b: natural LSE [T, H]. v_merged: where the output goes; may be v_a.
    Returns v_merged and the LSE [T, H].
    """
    lse = torch.logaddexp(s_a, s_b)
    mine, others = ((part_lse - lse).exp_().unsqueeze(-1) for part_lse in (s_a, s_b))
    v_merged.copy_(v_a * mine + v_b * others)
    return v_merged, lse


def fa3_of_vllm(
    fwd: Callable[..., Any], scheduler_metadata: Callable[..., torch.Tensor]
) -> FA3Kernels:
    """The kernels of vLLM's operators."""
    operators = FA3Operators(
        fwd=fwd, scheduler_metadata=scheduler_metadata, takes_chunks=False, takes_sinks=True
    )
    return operators.kernels(lacks=frozenset({CHUNKS, SINKS_OF_MIXED_DIMS}))


def fa3_of_flash_attn(
    fwd: Callable[..., Any], scheduler_metadata: Callable[..., torch.Tensor]
) -> FA3Kernels:
    """The kernels of FlashAttention's own operators."""
    operators = FA3Operators(
        fwd=fwd, scheduler_metadata=scheduler_metadata, takes_chunks=True, takes_sinks=False
    )
    return operators.kernels(lacks=frozenset({SINKS, SINKS_OF_MIXED_DIMS}))


def from_vllm() -> FA3Kernels:
    """vLLM's build, for SM90. Raises ImportError if vLLM is not installed or has none."""
    operators = load_operators("_vllm_fa3_C", "fwd", "vllm_flash_attn/_vllm_fa3_C")
    return fa3_of_vllm(operators.fwd.default, operators.get_scheduler_metadata.default)


def from_flash_attn() -> FA3Kernels:
    """FlashAttention's own build. Raises ImportError if it is not installed."""
    import_module("flash_attn_3._C")
    operators = torch.ops.flash_attn_3
    return fa3_of_flash_attn(operators.fwd.default, operators.get_scheduler_metadata.default)
