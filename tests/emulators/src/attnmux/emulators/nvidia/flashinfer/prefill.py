"""Many tokens a request over a paged cache."""

from __future__ import annotations

from typing import Any

import torch

from attnmux.emulators.nvidia.flashinfer.arguments import (
    buffer_of,
    dtype_of,
    items_of,
    refuse,
    refuse_unusual,
)
from attnmux.emulators.nvidia.flashinfer.numerics import pack_bits
from attnmux.emulators.nvidia.flashinfer.variants import variant_of
from attnmux.emulators.nvidia.flashinfer.wrapper import Paged


class BatchPrefillWithPagedKVCacheWrapper(Paged):
    """Many tokens a request over a paged cache."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: object = False,
    ) -> None:
        refuse_unusual((variant_owns_mask, False))
        variant = variant_of(backend, jit_args, jit_kwargs)
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, backend, variant)
        if use_cuda_graph:
            self._qo_indptr_buf = buffer_of(qo_indptr_buf)
            self._paged_kv_indptr_buf = buffer_of(paged_kv_indptr_buf)
            self._paged_kv_indices_buf = buffer_of(paged_kv_indices_buf)
            self._paged_kv_last_page_len_buf = buffer_of(paged_kv_last_page_len_buf)
            self._fixed_batch_size = len(self._qo_indptr_buf) - 1
            if custom_mask_buf is not None:
                # Given a buffer, a wrapper masks in every run.
                self._mask = (custom_mask_buf, buffer_of(mask_indptr_buf))

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        refuse(
            packed_custom_mask, rope_scale, rope_theta, seq_lens, seq_lens_q, block_tables,
            max_sequence_kv,
        )  # fmt: skip
        if custom_mask is not None and self._backend == "fa3":
            raise RuntimeError("fa3 has no custom mask")
        rows, size = int(qo_indptr[-1]), len(qo_indptr) - 1
        self._items = items_of(
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, size
        )
        if self._items is not None and (self._backend != "fa2" or self._variant is not None):
            raise NotImplementedError("the emulator has items in fa2's own softmax alone")
        if custom_mask is not None and self._variant is not None:
            raise NotImplementedError("the library's softmax with sinks looks at no mask")
        mask = None
        if custom_mask is not None:
            lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
            mask = pack_bits(custom_mask, torch.cumsum(qo_indptr.diff() * lens, 0))
        if self._use_cuda_graph:
            self._check_rows(rows)
            self._copy_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
            self._qo_indptr_buf.copy_(qo_indptr)
            if mask is not None:
                if self._mask is None:
                    raise ValueError("custom_mask_buf must be initialized in cuda graph mode")
                self._mask[0][: len(mask[0])].copy_(mask[0])
                self._mask[1].copy_(mask[1])
        else:
            self._qo_indptr_buf = qo_indptr.to(self.device)
            self._paged_kv_indptr_buf = paged_kv_indptr.to(self.device)
            self._paged_kv_indices_buf = paged_kv_indices.to(self.device)
            self._paged_kv_last_page_len_buf = paged_kv_last_page_len.to(self.device)
            self._mask = mask
        self._page_size = page_size
        self._planned(
            rows,
            heads=(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk),
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            dtypes=(dtype_of(q_data_type), dtype_of(kv_data_type or q_data_type)),
            pos_encoding_mode=pos_encoding_mode,
            disable_split_kv=disable_split_kv,
        )

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *args: object,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: object = "log2",
        lse_layout: object = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: object = None,
        uses_spcompress: object = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        refuse_unusual(
            (lse_base, "log2"),
            (lse_layout, "NH"),
            (use_fp16_softmax, None),
            (uses_spcompress, None),
        )
        return self._run_paged(
            q,
            paged_kv_cache,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            return_lse=return_lse,
            window_left=window_left,
            args=args,
            unserved=(sinks, kv_cache_sf, skip_softmax_threshold_scale_factor),
        )
