"""flashinfer 0.6.13 in plain torch: the wrappers that FlashInferBackend uses, on any device.

Signatures, layouts and rules are the library's:

- `plan` takes lengths and `run` obeys them: rows of Q, dtypes and window are those of the plan.
- With `use_cuda_graph` a wrapper's batch size is fixed, its buffers are the caller's, and `plan`
  copies into them; `run` reads these buffers alone, in static shapes and without a host read.
- Plans lie in the int workspace. A wrapper whose workspace another one has planned into since gives
  NaN, as the library gives garbage.
- LSE is in base 2; a row without keys has output 0 and LSE -5e4 (`math::inf` in math.cuh).
- A grid of no blocks cannot be launched.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

EMPTY_LSE = -5e4
MAX_THREADS = 1024

_STAMPS = itertools.count(1)
"""A number for each wrapper, which its plans leave in the int workspace."""


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states; all heads of a token are one block of threads."""
    for name, tensor in (("v_a", v_a), ("s_a", s_a), ("v_b", v_b), ("s_b", s_b)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    head_dim = v_a.shape[2]
    vec = max(16 // v_a.element_size(), head_dim // 32)
    if v_a.shape[1] * (head_dim // vec) > MAX_THREADS:
        raise RuntimeError("MergeState kernel launch failed: invalid configuration argument")
    top = torch.maximum(s_a, s_b)
    of_a, of_b = torch.exp2(s_a - top), torch.exp2(s_b - top)
    total = of_a + of_b
    merged = v_a.float() * (of_a / total).unsqueeze(-1) + v_b.float() * (of_b / total).unsqueeze(-1)
    return merged.to(v_a.dtype), top + total.log2()


def get_seq_lens(
    kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int
) -> torch.Tensor:
    """Lengths as the planner counts them."""
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len


class _Wrapper:
    """What all wrappers share."""

    device: torch.device
    _qo_indptr_buf: torch.Tensor

    def _start(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: object,
    ) -> None:
        if kv_layout != "NHD" or jit_args is not None:
            raise NotImplementedError("the emulator has NHD and the stock kernels alone")
        if float_workspace_buffer.dtype != torch.uint8:
            raise ValueError("the workspace is made of bytes")
        if float_workspace_buffer.data_ptr() % 16:
            raise ValueError("the workspace must be aligned to 16 bytes")
        self.device = float_workspace_buffer.device
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.zeros(64, dtype=torch.uint8, device=self.device)
        self._use_cuda_graph = use_cuda_graph
        self._backend = backend
        self._stamp = next(_STAMPS)
        self._rows: int | None = None
        self._max_total_num_rows: int | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = int_workspace_buffer

    def _check_graph(self, batch_size: int, fixed: int, num_indices: int, room: int) -> None:
        if batch_size != fixed:
            raise ValueError(
                f"The batch size should be fixed in cudagraph mode, the runtime batch size "
                f"{batch_size} mismatches the batch size set during initialization {fixed}"
            )
        if num_indices > room:
            raise ValueError(
                "The size of indices should be less than or equal to the allocated buffer"
            )

    def _check_rows(self, rows: int) -> None:
        if not self._use_cuda_graph:
            return
        if self._max_total_num_rows is None:
            self._max_total_num_rows = rows
        elif rows > self._max_total_num_rows:
            raise ValueError("The total number of rows exceeds that set during initialization")

    def _planned(
        self,
        rows: int,
        *,
        heads: tuple[int, int, int, int],
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        pos_encoding_mode: str,
        disable_split_kv: bool,
    ) -> None:
        """heads: Hq, Hkv and the dims of K and V."""
        if pos_encoding_mode != "NONE":
            raise NotImplementedError("the emulator knows no positions")
        if rows == 0:
            raise RuntimeError("a kernel was launched on no blocks: invalid configuration argument")
        if heads[0] % heads[1]:
            raise RuntimeError(f"num_qo_heads {heads[0]} should be divisible by {heads[1]}")
        self._rows = rows
        self._heads = heads
        self._causal = causal
        self._window_left = window_left
        self._logits_soft_cap = logits_soft_cap
        self._sm_scale = sm_scale
        self._dtypes = dtypes
        self._keeps_keys_whole = disable_split_kv
        self._int_workspace_buffer[:8].view(torch.int64).fill_(self._stamp)

    def _check_run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        window_left: int | None,
    ) -> None:
        if self._rows is None:
            raise RuntimeError("run before plan")
        num_qo_heads, num_kv_heads, dim_qk, dim_vo = self._heads
        if q.shape != (self._rows, num_qo_heads, dim_qk):
            raise ValueError(
                f"q is {tuple(q.shape)}, planned were {self._rows} rows of {self._heads}"
            )
        if k.shape[-2:] != (num_kv_heads, dim_qk) or v.shape[-2:] != (num_kv_heads, dim_vo):
            raise ValueError(f"k is {tuple(k.shape)}, planned were heads of {self._heads}")
        if (q.dtype, k.dtype) != self._dtypes:
            raise ValueError(f"{q.dtype} over {k.dtype} does not match the plan's {self._dtypes}")
        if q.stride(-1) != 1 or q.stride(-2) != dim_qk:
            raise ValueError("the heads of a token must lie together")
        if out is not None and (
            out.shape != (*q.shape[:2], dim_vo) or out.dtype != q.dtype or not out.is_contiguous()
        ):
            raise ValueError(f"out is {out.dtype} of shape {tuple(out.shape)}")
        if lse is not None and (lse.shape != q.shape[:2] or lse.dtype != torch.float32):
            raise ValueError(f"lse is {lse.dtype} of shape {tuple(lse.shape)}")
        assert window_left is None or window_left == self._window_left

    def _attend(
        self,
        q: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        mask: tuple[torch.Tensor, torch.Tensor] | None,
        scale: float,
        v_scale: float | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """keys: K and V of all requests end to end, the request and the place of each (request B
        for none), and the length of each request."""
        k, v, key_request, key_place, kv_lens = keys
        request, place = _segments(self._qo_indptr_buf, len(q))
        safe = request.clamp(max=len(kv_lens) - 1)
        position = place + (kv_lens - self._qo_indptr_buf.diff())[safe]
        keep = key_request == request.unsqueeze(1)
        if mask is not None:
            keep = keep & _mask_bits(mask, safe, place, key_place, kv_lens)
        elif self._causal:
            keep = keep & (key_place <= position.unsqueeze(1))
        if self._window_left >= 0:
            keep = keep & (key_place >= position.unsqueeze(1) - self._window_left)
        unread = (key_request == len(kv_lens)).view(-1, 1, 1)
        # How sums over split keys are rounded depends on the rest of the batch, as it does in
        # float32 here; in float64 it does not show.
        dtype = torch.float64 if self._keeps_keys_whole else torch.float32
        result, base_2 = _dense(
            q.to(dtype),
            k.to(dtype).masked_fill(unread, 0),
            v.to(dtype).masked_fill(unread, 0),
            keep,
            scale=scale,
            softcap=self._logits_soft_cap or 0.0,
        )
        mine = self._int_workspace_buffer[:8].view(torch.int64) == self._stamp
        result = torch.where(mine, result, math.nan).to(q.dtype)
        if v_scale is not None:
            result = result * v_scale
        out = result if out is None else out.copy_(result)
        return out, base_2 if lse is None else lse.copy_(base_2)


class _Paged(_Wrapper):
    """Keys in a paged cache."""

    _paged_kv_indptr_buf: torch.Tensor
    _paged_kv_indices_buf: torch.Tensor
    _paged_kv_last_page_len_buf: torch.Tensor
    _page_size: int
    _mask: tuple[torch.Tensor, torch.Tensor] | None = None

    def _run_paged(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        q_scale: float | None,
        k_scale: float | None,
        v_scale: float | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        window_left: int | None,
        unserved: tuple[object, ...],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        _refuse(*unserved)
        k_cache, v_cache = paged_kv_cache
        if k_cache.stride() != v_cache.stride():
            raise RuntimeError("k/v strides differs")
        if k_cache.shape[1] != self._page_size:
            raise ValueError(f"pages of {k_cache.shape[1]}, planned were {self._page_size}")
        self._check_run(q, k_cache, v_cache, out, lse, window_left)
        scale = 1 / math.sqrt(q.shape[-1]) if self._sm_scale is None else self._sm_scale
        for factor in (q_scale, k_scale):
            scale *= 1.0 if factor is None else factor
        result, base_2 = self._attend(
            q,
            self._gather(k_cache, v_cache),
            mask=self._mask,
            scale=scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
        )
        return (result, base_2) if return_lse else result

    def _gather(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        indptr, page_size = self._paged_kv_indptr_buf, self._page_size
        counts = indptr.diff()
        kv_lens = (counts - 1) * page_size + self._paged_kv_last_page_len_buf
        kv_lens = torch.where(counts == 0, 0, kv_lens)
        pages = self._paged_kv_indices_buf.long()
        request, page = _segments(indptr, len(pages))
        in_page = torch.arange(page_size, device=pages.device)
        place = (page.unsqueeze(1) * page_size + in_page).flatten()
        request = request.repeat_interleave(page_size)
        lens = torch.cat([kv_lens, kv_lens.new_zeros(1)])
        request = torch.where(place < lens[request], request, len(kv_lens))
        # A gather of 8-bit floats is not everywhere there.
        keys, values = (
            cache.view(torch.uint8)[pages].view(cache.dtype)
            if cache.element_size() == 1
            else cache[pages]
            for cache in (k_cache, v_cache)
        )
        return keys.flatten(0, 1), values.flatten(0, 1), request, place, kv_lens


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
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
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        self._use_tensor_cores = use_tensor_cores
        if use_cuda_graph:
            self._paged_kv_indptr_buf = _buffer(paged_kv_indptr_buffer)
            self._paged_kv_indices_buf = _buffer(paged_kv_indices_buffer)
            self._paged_kv_last_page_len_buf = _buffer(paged_kv_last_page_len_buffer)
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
        _refuse(data_type, rope_scale, rope_theta, block_tables, seq_lens)
        if fixed_split_size is not None and not self._use_tensor_cores:
            raise ValueError("fixed_split_size is only supported by tensor core decode for now.")
        size = len(last_page_len)
        if self._use_cuda_graph:
            room = len(self._paged_kv_indices_buf)
            self._check_graph(size, self._fixed_batch_size, len(indices), room)
            self._paged_kv_indptr_buf.copy_(indptr)
            self._paged_kv_last_page_len_buf.copy_(last_page_len)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        else:
            self._paged_kv_indptr_buf = indptr.to(self.device)
            self._paged_kv_indices_buf = indices.to(self.device)
            self._paged_kv_last_page_len_buf = last_page_len.to(self.device)
            self._qo_indptr_buf = torch.arange(size + 1, dtype=torch.int32, device=self.device)
        self._was_planned = True
        self._check_group(num_qo_heads // num_kv_heads)
        self._page_size = page_size
        self._planned(
            size,
            heads=(num_qo_heads, num_kv_heads, head_dim, head_dim),
            causal=False,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            dtypes=(_dtype(q_data_type), _dtype(kv_data_type or q_data_type)),
            pos_encoding_mode=pos_encoding_mode,
            disable_split_kv=disable_split_kv and self._use_tensor_cores,
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
            unserved=(
                *args, sinks, q_len_per_req, skip_softmax_threshold_scale_factor, kv_cache_sf,
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
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """`plan` without its copies into fixed buffers, on a wrapper that was planned before."""
    _refuse(data_type, rope_scale, rope_theta)
    if not getattr(self, "_was_planned", False):
        raise RuntimeError("Error in standard plan: no module, since plan was never called")
    size = len(last_page_len)
    if self._use_cuda_graph:
        room = len(self._paged_kv_indices_buf)
        self._check_graph(size, self._fixed_batch_size, len(indices), room)
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
        dtypes=(_dtype(q_data_type), _dtype(kv_data_type or q_data_type)),
        pos_encoding_mode=pos_encoding_mode,
        disable_split_kv=disable_split_kv and self._use_tensor_cores,
    )


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
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
    ) -> None:
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)
        if use_cuda_graph:
            self._qo_indptr_buf = _buffer(qo_indptr_buf)
            self._paged_kv_indptr_buf = _buffer(paged_kv_indptr_buf)
            self._paged_kv_indices_buf = _buffer(paged_kv_indices_buf)
            self._paged_kv_last_page_len_buf = _buffer(paged_kv_last_page_len_buf)
            self._fixed_batch_size = len(self._qo_indptr_buf) - 1
            if custom_mask_buf is not None:
                # Given a buffer, a wrapper masks in every run.
                self._mask = (custom_mask_buf, _buffer(mask_indptr_buf))

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
        _refuse(
            packed_custom_mask, rope_scale, rope_theta, prefix_len_ptr, token_pos_in_items_ptr,
            max_item_len_ptr, seq_lens, seq_lens_q, block_tables, max_sequence_kv,
        )  # fmt: skip
        if custom_mask is not None and self._backend == "fa3":
            raise RuntimeError("fa3 has no custom mask")
        rows, size = int(qo_indptr[-1]), len(qo_indptr) - 1
        mask = None
        if custom_mask is not None:
            lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
            mask = _pack(custom_mask, torch.cumsum(qo_indptr.diff() * lens, 0))
        if self._use_cuda_graph:
            self._check_rows(rows)
            room = len(self._paged_kv_indices_buf)
            self._check_graph(size, self._fixed_batch_size, len(paged_kv_indices), room)
            self._qo_indptr_buf.copy_(qo_indptr)
            self._paged_kv_indptr_buf.copy_(paged_kv_indptr)
            self._paged_kv_last_page_len_buf.copy_(paged_kv_last_page_len)
            self._paged_kv_indices_buf[: len(paged_kv_indices)].copy_(paged_kv_indices)
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
            dtypes=(_dtype(q_data_type), _dtype(kv_data_type or q_data_type)),
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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
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
            unserved=(*args, sinks, kv_cache_sf, skip_softmax_threshold_scale_factor),
        )


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    """Many tokens a request over K and V that lie end to end."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if use_cuda_graph:
            raise NotImplementedError("the emulator's ragged wrapper runs eagerly")
        self._start(float_workspace_buffer, kv_layout, use_cuda_graph, backend, jit_args)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
    ) -> None:
        _refuse(
            custom_mask, packed_custom_mask, rope_scale, rope_theta, prefix_len_ptr,
            token_pos_in_items_ptr, max_item_len_ptr, seq_lens, seq_lens_q, v_indptr, o_indptr,
        )  # fmt: skip
        if len(kv_indptr) != len(qo_indptr):
            raise ValueError("The kv_indptr length should be equal to mask_indptr length.")
        self._qo_indptr_buf = qo_indptr.to(self.device)
        self._kv_indptr_buf = kv_indptr.to(self.device)
        self._planned(
            int(qo_indptr[-1]),
            heads=(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk),
            causal=causal,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            dtypes=(_dtype(q_data_type), _dtype(kv_data_type or q_data_type)),
            pos_encoding_mode=pos_encoding_mode,
            disable_split_kv=disable_split_kv,
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: object,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The scales are for 8-bit and 4-bit kernels: these do not read them."""
        _refuse(*args, kv_cache_sf)
        self._check_run(q, k, v, out, lse, None)
        request, place = _segments(self._kv_indptr_buf, len(k))
        scale = 1 / math.sqrt(q.shape[-1]) if self._sm_scale is None else self._sm_scale
        result, base_2 = self._attend(
            q,
            (k, v, request, place, self._kv_indptr_buf.diff()),
            mask=None,
            scale=scale,
            v_scale=None,
            out=out,
            lse=lse,
        )
        return (result, base_2) if return_lse else result


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    *,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: [T, Hq, D]. k: [S, Hkv, D]. v: [S, Hkv, Dv]. keep: [T, S]. Returns out [T, Hq, Dv] in the
    dtype of q, and base-2 LSE [T, Hq] in float32."""
    num_rows, num_heads, head_dim = q.shape
    grouped = q.view(num_rows, k.shape[1], -1, head_dim)
    logits = torch.einsum("thgd,shd->thgs", grouped, k) * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logits = (logits / math.log(2)).masked_fill(~keep[:, None, None], EMPTY_LSE)
    top = logits.amax(-1, keepdim=True)
    weights = torch.exp2(logits - top) * keep[:, None, None]
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("thgs,shd->thgd", weights, v) / total.clamp(min=1e-30)
    lse = torch.where(total > 0, top + total.log2(), EMPTY_LSE)
    return out.flatten(1, 2), lse.float().view(num_rows, num_heads)


def _segments(indptr: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The segment of each of `length` places, B past the last, and the place in it."""
    order = torch.arange(length, device=indptr.device)
    segment = torch.searchsorted(indptr[1:].long(), order, right=True)
    return segment, order - indptr.long()[segment]


def _mask_bits(
    mask: tuple[torch.Tensor, torch.Tensor],
    request: torch.Tensor,
    place: torch.Tensor,
    key_place: torch.Tensor,
    kv_lens: torch.Tensor,
) -> torch.Tensor:
    """[rows, keys] bool: bit q * kv_len + k of the request's bytes."""
    packed, indptr = mask
    bit = place.unsqueeze(1) * kv_lens[request].unsqueeze(1) + key_place
    byte = indptr[:-1].long()[request].unsqueeze(1) + bit // 8
    return (packed[byte.clamp(0, len(packed) - 1)] >> (bit % 8)) & 1 == 1


def _pack(mask: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`segment_packbits`, little: bytes, and where each request's begin."""
    flat, start, parts = mask.contiguous().view(-1), 0, []
    weights = 2 ** torch.arange(8, device=mask.device)
    for end in ends.tolist():
        bits = flat[start:end]
        bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).view(-1, 8)
        parts.append((bits * weights).sum(1).to(torch.uint8))
        start = end
    sizes = torch.tensor([0, *(len(part) for part in parts)], device=mask.device)
    return torch.cat(parts), sizes.cumsum(0).to(torch.int32)


def _dtype(name: str | torch.dtype | None) -> torch.dtype:
    made = getattr(torch, name) if isinstance(name, str) else name
    if not isinstance(made, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return made


def _buffer(buffer: torch.Tensor | None) -> torch.Tensor:
    if buffer is None:
        raise ValueError("a buffer should be a torch.Tensor in cudagraph mode")
    return buffer


def _refuse(*values: object) -> None:
    if any(value is not None for value in values):
        raise NotImplementedError("an argument that the emulator does not know")
