"""What all wrappers share."""

from __future__ import annotations

import itertools
import math

import torch

from attnmux.emulators.nvidia.flashinfer.numerics import dense, item_keep, mask_bits, segments
from attnmux.emulators.nvidia.flashinfer.variants import Variant
from attnmux.nvidia.rows import is_aligned

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
        if not all(map(is_aligned, (q, k, v, *(() if out is None else (out,))))):
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
