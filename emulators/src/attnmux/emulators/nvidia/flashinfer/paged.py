"""Wrappers over a paged cache."""

from __future__ import annotations

import math
from typing import Any

import torch

from attnmux.emulators.nvidia.flashinfer.arguments import refuse
from attnmux.emulators.nvidia.flashinfer.numerics import loaded_behind, segments
from attnmux.emulators.nvidia.flashinfer.wrapper import Wrapper


class Paged(Wrapper):
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
        """[rows] bool: for which V is loaded behind the pages of all requests, where that is not
        finite: slot 0 stands there (`protective_get_kv_offset` in page.cuh)."""
        assert self._items is not None
        indptr, page_size = self._paged_kv_indptr_buf, self._page_size
        kv_lens = self._kv_lens()
        request, place = segments(self._qo_indptr_buf, num_rows)
        request = request.clamp(max=len(kv_lens) - 1)
        position = place + (kv_lens - self._qo_indptr_buf.diff())[request]
        end = loaded_behind(self._items, request, position, kv_lens)
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
