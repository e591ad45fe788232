"""One token a request."""

from __future__ import annotations

from typing import Any

import torch

from attnmux.emulators.nvidia.flashinfer.arguments import (
    buffer_of,
    dtype_of,
    refuse,
    refuse_unusual,
)
from attnmux.emulators.nvidia.flashinfer.wrapper import Paged


class BatchDecodeWithPagedKVCacheWrapper(Paged):
    """One token a request."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        refuse(jit_args)
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, backend, None)
        self._use_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            self._paged_kv_indptr_buf = buffer_of(paged_kv_indptr_buffer)
            self._paged_kv_indices_buf = buffer_of(paged_kv_indices_buffer)
            self._paged_kv_last_page_len_buf = buffer_of(paged_kv_last_page_len_buffer)
            self._fixed_batch_size = len(self._paged_kv_last_page_len_buf)
            if len(self._paged_kv_indptr_buf) != self._fixed_batch_size + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
            size = self._fixed_batch_size
            self._qo_indptr_buf = torch.arange(size + 1, dtype=torch.int32, device=self.device)

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: object,
        **kwargs: Any,  # noqa: ANN401  # of `_plan_impl`
    ) -> None:
        refuse(*deprecated_positional_args)
        lens = indptr, indices, last_page_len
        self._plan_impl(*lens, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
    ) -> None:
        refuse(data_type, rope_scale, rope_theta, block_tables, seq_lens)
        if fixed_split_size is not None and not self._use_tensor_cores:
            raise ValueError("fixed_split_size is only supported by tensor core decode for now.")
        self._check_group(num_qo_heads // num_kv_heads)
        if self._use_cuda_graph:
            self._copy_pages(indptr, indices, last_page_len)
        self._was_planned = True
        fast_decode_plan(
            self,
            indptr.to(self.device),
            indices.to(self.device),
            last_page_len.to(self.device),
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
            sm_scale=sm_scale,
            disable_split_kv=disable_split_kv,
        )

    def _check_group(self, size: int) -> None:
        if not self._use_tensor_cores and size not in (1, 2, 3, 4, 8):
            raise RuntimeError(f"Unsupported group_size: {size}")

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
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
            unserved=(
                sinks, q_len_per_req, skip_softmax_threshold_scale_factor, kv_cache_sf,
            ),
        )  # fmt: skip


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: object = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """`plan` without its copies into fixed buffers, on a wrapper that was planned before."""
    refuse_unusual((q_len_per_req, 1))
    refuse(data_type, rope_scale, rope_theta)
    if not getattr(self, "_was_planned", False):
        raise RuntimeError("Error in standard plan: no module, since plan was never called")
    size = len(last_page_len)
    if self._use_cuda_graph:
        self._check_graph(size, len(indices))
    else:
        self._paged_kv_indptr_buf = indptr
        self._paged_kv_indices_buf = indices
        self._paged_kv_last_page_len_buf = last_page_len
        self._qo_indptr_buf = torch.arange(size + 1, dtype=torch.int32, device=self.device)
    q_data_type = q_data_type or "float16"
    self._page_size = page_size
    self._planned(
        size,
        heads=(num_qo_heads, num_kv_heads, head_dim, head_dim),
        causal=False,
        window_left=window_left,
        logits_soft_cap=logits_soft_cap,
        sm_scale=sm_scale,
        dtypes=(dtype_of(q_data_type), dtype_of(kv_data_type or q_data_type)),
        pos_encoding_mode=pos_encoding_mode,
        disable_split_kv=disable_split_kv and self._use_tensor_cores,
    )
