"""What all wrappers share, and those over a paged cache."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from attnmux.core.plugin import Rows
from attnmux.emulators.nvidia.flashinfer.arguments import refuse
from attnmux.emulators.nvidia.flashinfer.numerics import (
    dense,
    item_keep,
    loaded_past_the_end,
    mask_bits,
    segments,
)
from attnmux.emulators.nvidia.flashinfer.variants import Variant

_STAMPS = itertools.count(1)
"""A number for each wrapper, which its plans leave in the int workspace."""


class Wrapper:
    """What all wrappers share."""

    device: torch.device
    _qo_indptr_buf: torch.Tensor
    _items: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """Lengths of the prefix [B], places in items [B, width], the largest place [B]."""

    def _start(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        variant: Variant | None,
    ) -> None:
        if kv_layout != "NHD":
            raise NotImplementedError("the emulator has NHD alone")
        if float_workspace_buffer.dtype != torch.uint8:
            raise ValueError("the workspace is made of bytes")
        if float_workspace_buffer.data_ptr() % 16:
            raise ValueError("the workspace must be aligned to 16 bytes")
        self.device = float_workspace_buffer.device
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.zeros(64, dtype=torch.uint8, device=self.device)
        self._use_cuda_graph = use_cuda_graph
        self._variant = variant
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
        if self._variant is not None:
            self._variant.check(heads, dtypes, window_left)
        if self._use_cuda_graph and disable_split_kv:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._rows = rows
        self._heads = heads
        self._causal = causal
        self._window_left = window_left
        self._logits_soft_cap = logits_soft_cap
        self._sm_scale = sm_scale
        self._dtypes = dtypes
        self._keeps_keys_whole = disable_split_kv
        self._int_workspace_buffer[:8].view(torch.int64).fill_(self._stamp)

    def _check_planned(self) -> None:
        if self._rows is None:
            raise RuntimeError("run before plan")

    def _check_run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        window_left: int | None,
    ) -> None:
        self._check_planned()
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
        if not all(map(Rows.is_aligned, (q, k, v, *(() if out is None else (out,))))):
            raise RuntimeError("CUDA error: misaligned address")
        if out is not None and (
            out.shape != (*q.shape[:2], dim_vo) or out.dtype != q.dtype or not out.is_contiguous()
        ):
            raise ValueError(f"out is {out.dtype} of shape {tuple(out.shape)}")
        if lse is not None and not lse.is_contiguous():
            raise NotImplementedError("the library writes to other places")
        if lse is not None and (lse.shape != q.shape[:2] or lse.dtype != torch.float32):
            raise ValueError(f"lse is {lse.dtype} of shape {tuple(lse.shape)}")
        assert window_left is None or window_left == self._window_left

    def _loads(
        self, mine: torch.Tensor, request: torch.Tensor, kv_lens: torch.Tensor
    ) -> torch.Tensor:
        """[T, S] bool: the keys whose V a row's kernel multiplies, by weights of 0 where the keys
        are not the request's.

        mine: [T, S] bool. request: [T], of each row. kv_lens: [B].
        """
        return mine

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
        sinks: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """keys: K and V of all requests end to end, the request and the place of each (request B
        for none), and the length of each request."""
        k, v, key_request, key_place, kv_lens = keys
        request, place = segments(self._qo_indptr_buf, len(q))
        safe = request.clamp(max=len(kv_lens) - 1)
        position = place + (kv_lens - self._qo_indptr_buf.diff())[safe]
        keep = key_request == request.unsqueeze(1)
        loads = self._loads(keep, safe, kv_lens)
        if self._items is not None:
            keep = keep & item_keep(self._items, safe, position, key_place)
        elif mask is not None:
            keep = keep & mask_bits(mask, safe, place, key_place, kv_lens)
        elif self._causal:
            keep = keep & (key_place <= position.unsqueeze(1))
        if self._window_left >= 0:
            keep = keep & (key_place >= position.unsqueeze(1) - self._window_left)
        unread = (key_request == len(kv_lens)).view(-1, 1, 1)
        # How sums over split keys are rounded depends on the rest of the batch, as it does in
        # float32 here; in float64 it does not show.
        dtype = torch.float64 if self._keeps_keys_whole else torch.float32
        result, base_2 = dense(
            q.to(dtype),
            k.to(dtype).masked_fill(unread, 0),
            v.to(dtype).masked_fill(unread, 0),
            keep,
            loads,
            scale=scale,
            softcap=0.0 if self._variant else self._logits_soft_cap or 0.0,
            sinks=sinks,
        )
        mine = self._int_workspace_buffer[:8].view(torch.int64) == self._stamp
        result = torch.where(mine, result, math.nan).to(q.dtype)
        if v_scale is not None:
            result = result * v_scale
        out = result if out is None else out.copy_(result)
        return out, base_2 if lse is None else lse.copy_(base_2)


class Paged(Wrapper):
    """Keys in a paged cache."""

    _paged_kv_indptr_buf: torch.Tensor
    _paged_kv_indices_buf: torch.Tensor
    _paged_kv_last_page_len_buf: torch.Tensor
    _page_size: int
    _fixed_batch_size: int
    """In graphs."""
    _mask: tuple[torch.Tensor, torch.Tensor] | None = None

    def _check_graph(self, batch_size: int, num_indices: int) -> None:
        if batch_size != self._fixed_batch_size:
            raise ValueError(
                f"The batch size should be fixed in cudagraph mode, the runtime batch size "
                f"{batch_size} mismatches the batch size set during initialization "
                f"{self._fixed_batch_size}"
            )
        if num_indices > len(self._paged_kv_indices_buf):
            raise ValueError(
                "The size of indices should be less than or equal to the allocated buffer"
            )

    def _copy_pages(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor
    ) -> None:
        """Into the buffers that graphs read."""
        self._check_graph(len(last_page_len), len(indices))
        self._paged_kv_indptr_buf.copy_(indptr)
        self._paged_kv_last_page_len_buf.copy_(last_page_len)
        self._paged_kv_indices_buf[: len(indices)].copy_(indices)

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
        args: tuple[Any, ...],
        unserved: tuple[object, ...],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        refuse(*unserved, *(() if self._variant else args))
        self._check_planned()
        k_cache, v_cache = paged_kv_cache
        if k_cache.stride() != v_cache.stride():
            raise RuntimeError("k/v strides differs")
        if k_cache.shape[1] != self._page_size:
            raise ValueError(f"pages of {k_cache.shape[1]}, planned were {self._page_size}")
        self._check_run(q, k_cache, v_cache, out, lse, window_left)
        scale = 1 / math.sqrt(q.shape[-1]) if self._sm_scale is None else self._sm_scale
        for factor in (q_scale, k_scale):
            scale *= 1.0 if factor is None else factor
        sinks = None
        if self._variant is not None:
            # In place of the plan's scale and of the factors.
            sinks, scale = args
        result, base_2 = self._attend(
            q,
            self._gather(k_cache, v_cache),
            mask=self._mask,
            scale=scale,
            v_scale=v_scale,
            out=out,
            lse=lse,
            sinks=sinks,
        )
        if self._items is not None:
            result.masked_fill_(self._spoilt(len(q), v_cache).view(-1, 1, 1), math.nan)
        return (result, base_2) if return_lse else result

    def _spoilt(self, num_rows: int, v_cache: torch.Tensor) -> torch.Tensor:
        """[rows] bool: for which V is loaded after the pages of all requests, where that is not
        finite: it is slot 0's (`protective_get_kv_offset` in page.cuh)."""
        assert self._items is not None
        indptr, page_size = self._paged_kv_indptr_buf, self._page_size
        kv_lens = self._kv_lens()
        request, place = segments(self._qo_indptr_buf, num_rows)
        request = request.clamp(max=len(kv_lens) - 1)
        position = place + (kv_lens - self._qo_indptr_buf.diff())[request]
        end = loaded_past_the_end(self._items, request, position, kv_lens)
        of_pages = (indptr[-1] - indptr[:-1]) * page_size
        return (end > of_pages[request]) & ~v_cache[0, 0].float().isfinite().all()

    def _kv_lens(self) -> torch.Tensor:
        counts = self._paged_kv_indptr_buf.diff()
        kv_lens = (counts - 1) * self._page_size + self._paged_kv_last_page_len_buf
        return torch.where(counts == 0, 0, kv_lens)

    def _gather(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        indptr, page_size = self._paged_kv_indptr_buf, self._page_size
        kv_lens = self._kv_lens()
        pages = self._paged_kv_indices_buf.long()
        request, page = segments(indptr, len(pages))
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
