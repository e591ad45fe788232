"""vLLM's operators of FlashMLA, with the parameters of their schemas."""

from __future__ import annotations

import torch

from attnmux.emulators.nvidia.flash_mla import kernel
from attnmux.emulators.nvidia.flash_mla_sparse import sparse_prefill

Optional = torch.Tensor | None


class FlashMLAOperators:
    """`torch.ops._flashmla_C`."""

    @staticmethod
    def dense_decode_fwd(
        q: torch.Tensor,
        kcache: torch.Tensor,
        head_size_v: int,
        seqlens_k: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        is_causal: bool,
        tile_scheduler_metadata: Optional,
        num_splits: Optional,
        out_: Optional,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Makes the schedule unless it is given one. Raises RuntimeError for 8-bit operands."""
        kernel.check(q.element_size() == 2, "q_dtype == BFloat16 || q_dtype == Half")
        kernel.check(out_ is None, "the emulator allocates the output")
        if tile_scheduler_metadata is None or num_splits is None:
            num_rows = q.shape[1] * q.shape[2]
            made = kernel.schedule(seqlens_k, num_rows, kcache.shape[2], is_fp8=False)
        else:
            made = tile_scheduler_metadata, num_splits
        operands = (q, kcache, block_table, seqlens_k, head_size_v, made)
        result = kernel.decode(*operands, scale=softmax_scale, causal=is_causal)
        return *result, *made

    @staticmethod
    def sparse_prefill_fwd(
        q: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        sm_scale: float,
        d_v: int,
        attn_sink: Optional,
        topk_length: Optional,
        out_: Optional,
    ) -> list[torch.Tensor]:
        """Its LSE is natural."""
        kernel.check(out_ is None, "the emulator allocates the output")
        return list(sparse_prefill(q, kv, indices, sm_scale, d_v, attn_sink, topk_length))


class FlashMLAExtension:
    """`torch.ops._flashmla_extension_C`."""

    @staticmethod
    def fwd_kvcache_mla_fp8(
        q: torch.Tensor,
        kcache: torch.Tensor,
        head_size_v: int,
        seqlens_k: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        is_causal: bool,
        tile_scheduler_metadata: torch.Tensor,
        num_splits: torch.Tensor,
        descale_q: Optional,
        descale_k: Optional,
    ) -> list[torch.Tensor]:
        kernel.check(q.element_size() == 1, "q.scalar_type() == Float8_e4m3fn")
        made = tile_scheduler_metadata, num_splits
        operands = (q, kcache, block_table, seqlens_k, head_size_v, made)
        descales = descale_q, descale_k
        return list(
            kernel.decode(*operands, scale=softmax_scale, causal=is_causal, descales=descales)
        )

    @staticmethod
    def get_mla_decoding_metadata_dense_fp8(
        seqlens_k: torch.Tensor, num_heads_per_head_k: int, num_heads_k: int
    ) -> list[torch.Tensor]:
        return list(kernel.schedule(seqlens_k, num_heads_per_head_k, num_heads_k, is_fp8=True))
