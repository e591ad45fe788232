"""MLA over a paged cache, as `flashinfer.mla` of 0.7.2 has it on a Hopper GPU.

What a kernel reads of a plan lies in an int workspace, and in the indices, which `plan` takes as
they are where they lie on the device: a captured run goes on reading both. Each `plan` allocates a
workspace and drops the last one, which the emulator overwrites; `_cached_module.plan` plans into
the workspace that it is given. A run's blocks are those of the plan at capture, so rows a tile are
too (`num_blks_x` and `num_blks_y`): a plan for tiles of other sizes has results nowhere.

The causal kernels find the last 64 keys that a tile of rows sees with a division rounded down
(`kv_tile_idx` in mla.cuh and mla_hopper.cuh): where a tile ends within a token, keys are left out.
0.7.2 refuses such plans; the emulator does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core.plugin import Rows
from attnmux.emulators.nvidia.dense import attend, finite_values
from attnmux.emulators.nvidia.flashinfer.arguments import buffer_of, refuse

RANK, ROPE = 512, 64
DTYPES = (torch.bfloat16, torch.float16)

NUM_SMS = 132
"""SMs of an H200."""

MAX_WORKS = 16384
"""That a plan has room for (`max_total_num_works` in scheduler.cuh)."""

INT_WORKSPACE_BYTES = 8 << 20
CTA_ROWS = 64
KEY_TILE = 64


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MLAPlanMetadata:
    """The lengths of a plan."""

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor

    @classmethod
    def csr(
        cls,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
    ) -> MLAPlanMetadata:
        return cls(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            kv_len_arr=kv_len_arr,
        )


class _Module:
    """The compiled kernels."""

    def plan(
        self,
        float_workspace_buffer: torch.Tensor,
        int_workspace_buffer: torch.Tensor,
        page_locked_int_workspace_buffer: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_len: torch.Tensor,
        num_heads: int,
        head_dim_o: int,
        causal: bool,
    ) -> tuple[int, int, int]:
        """Returns rows of a tile, requests, and rows."""
        q_lens, batch_size = qo_indptr.diff().long(), len(kv_len)
        if not batch_size:
            raise RuntimeError("floating point exception: the number of rows over 0 requests")
        if bool((q_lens < 0).any()):
            raise RuntimeError("qo_indptr should be non-negative")
        mean = int(q_lens.sum()) * num_heads // batch_size
        tile = 2 * CTA_ROWS if mean > CTA_ROWS else CTA_ROWS
        works = _count_works(q_lens, kv_len.long(), num_heads, tile, causal=causal)
        if works > MAX_WORKS:
            raise RuntimeError(f"{works} works are written over the {MAX_WORKS} of a plan")
        # Twice a tile of every SM is partial results, whatever the step: `MLAPlan`.
        needed = 2 * NUM_SMS * CTA_ROWS * (RANK * 2 + 4)
        if float_workspace_buffer.nbytes < needed:
            raise RuntimeError(f"Buffer overflow when allocating memory for mla_partial: {needed}")
        table = torch.stack([qo_indptr[:-1], qo_indptr.diff(), kv_indptr[:-1], kv_len])
        plan_table(int_workspace_buffer, batch_size).copy_(table)
        plan_shape(int_workspace_buffer).copy_(torch.tensor([tile, batch_size]))
        return tile, batch_size, int(q_lens.sum())


@dataclass(kw_only=True, slots=True, eq=False)
class _PlannedBackend:
    """What a launch reads of its wrapper besides the workspace."""

    _plan_info: tuple[int, int, int]
    _kv_indices_buf: torch.Tensor
    planned_rows: int
    """Rows of the last `plan`; 0.7.4 refuses others."""


def plan_shape(workspace: torch.Tensor) -> torch.Tensor:
    """[2] int32: rows of a tile, and requests, on which the emulator's lists depend."""
    return workspace[:8].view(torch.int32)


def plan_table(workspace: torch.Tensor, batch_size: int) -> torch.Tensor:
    """[4, B] int32: first row, rows, first page among those end to end, and keys."""
    return workspace[16 : 16 + 16 * batch_size].view(torch.int32).view(4, batch_size)


class BatchMLAPagedAttentionWrapper:
    """One latent head for all query heads; V is the latent part of K."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        refuse(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        if use_cuda_graph or backend not in ("auto", "fa2", "fa3"):
            raise NotImplementedError("the emulator has fa2 and fa3, without buffers for graphs")
        self._float_workspace_buffer = float_workspace_buffer
        self.device = float_workspace_buffer.device
        self._int_workspace_buffer = torch.empty(0, dtype=torch.uint8)
        self._planned_backend: _PlannedBackend | None = None
        self._backend = "fa3" if backend == "auto" else backend

    def plan(
        self,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        refuse(cum_seq_lens_q, block_tables, seq_lens, max_q_len, output_dtype, enable_pdl)
        flat = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        if metadata is None:
            metadata = MLAPlanMetadata.csr(*map(buffer_of, flat))
            self._lse_mode = "any"  # deprecated, as these arguments are
        else:
            refuse(*flat)
            if (query_layout, kv_cache_layout) != ("split", "split"):
                raise NotImplementedError("the emulator takes both parts of Q and of K apart")
            self._lse_mode = lse_mode
        if num_heads is None or page_size is None or sm_scale is None or causal is None:
            raise TypeError("plan() missing required arguments")
        self._check_module(head_dim_ckv, head_dim_kpe, q_data_type, kv_data_type, use_profiler)
        lists = [metadata.qo_indptr, metadata.kv_indptr, metadata.kv_len_arr]
        if any(values.dtype != torch.int32 for values in (*lists, metadata.kv_indices)):
            raise ValueError("metadata must have dtype torch.int32")
        _check_pages(metadata, page_size)
        # The last workspace is free for others, whatever still reads it.
        self._int_workspace_buffer.fill_(255)
        self._int_workspace_buffer = torch.empty(
            INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device
        )
        self._pin_memory_int_workspace_buffer = self._int_workspace_buffer.to("cpu", copy=True)
        self._cached_module = _Module()
        qo_bounds, kv_bounds, kv_lens = (values.to("cpu") for values in lists)
        info = self._cached_module.plan(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            qo_bounds,
            kv_bounds,
            kv_lens,
            num_heads,
            RANK,
            causal,
        )
        self._planned_backend = _PlannedBackend(
            _plan_info=info,
            _kv_indices_buf=metadata.kv_indices.to(self.device),
            planned_rows=info[2],
        )
        self._num_heads, self._page_size = num_heads, page_size
        self._causal, self._sm_scale, self._dtype = causal, sm_scale, q_data_type

    def run(
        self,
        q_nope: torch.Tensor | None = None,
        q_pe: torch.Tensor | None = None,
        ckv_cache: torch.Tensor | None = None,
        kpe_cache: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: Any = None,  # noqa: ANN401  # a pair of tensors
        kv_cache: Any = None,  # noqa: ANN401  # as query
        ckv_scale: float | None = None,
        ckv_scale_arr: torch.Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | None = None,
        bmm2_scale: float | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        refuse(
            profiler_buffer, kv_len, page_table, o_scale, ckv_scale, ckv_scale_arr, kpe_scale,
            sinks, skip_softmax_threshold_scale_factor, bmm1_scale, bmm2_scale,
        )  # fmt: skip
        tile, batch_size, _ = self._planned()._plan_info
        q_nope, q_pe = (buffer_of(q_nope), buffer_of(q_pe)) if query is None else query
        ckv_cache, kpe_cache = (
            (buffer_of(ckv_cache), buffer_of(kpe_cache)) if kv_cache is None else kv_cache
        )
        mode = "none"
        if return_lse or lse is not None or return_lse_base_on_e:
            mode = "basee" if return_lse_base_on_e else "base2"
        if self._lse_mode not in ("any", mode):
            raise ValueError(f"LSE mode {mode}, planned was {self._lse_mode}")
        if out is None:
            out = torch.full_like(q_nope, math.nan)
        elif out.shape != q_nope.shape or out.dtype != q_nope.dtype:
            raise ValueError(f"Invalid shape or dtype of out: {tuple(out.shape)}, {out.dtype}")
        if return_lse and lse is None:
            lse = torch.full(q_nope.shape[:2], math.nan, device=self.device)
        elif lse is not None and (lse.shape != q_nope.shape[:2] or lse.dtype != torch.float32):
            raise ValueError(f"Invalid shape or dtype of lse: {tuple(lse.shape)}, {lse.dtype}")
        self._check_run(q_nope, q_pe, ckv_cache, kpe_cache, out, lse)
        result, natural, written = self._attend(q_nope, q_pe, ckv_cache, kpe_cache)
        shape = plan_shape(self._int_workspace_buffer)
        fits = (shape[0] == tile) & (shape[1] == batch_size)
        result = torch.where(fits, result, math.nan)
        out.copy_(torch.where(written[:, None, None], result.to(out.dtype), out))
        if lse is not None:
            made = natural if return_lse_base_on_e else natural / math.log(2)
            lse.copy_(torch.where(written[:, None], made, lse))
        return (out, lse) if return_lse and lse is not None else out

    def _planned(self) -> _PlannedBackend:
        if self._planned_backend is None:
            raise RuntimeError("BatchMLAPagedAttentionWrapper.run() called before plan().")
        return self._planned_backend

    def _attend(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, H, 512], natural LSE [T, H], and which rows are of a request: [T]."""
        num_rows, heads = q_nope.shape[:2]
        planned = self._planned()
        batch_size = planned._plan_info[1]
        table = plan_table(self._int_workspace_buffer, batch_size).long()
        rows = torch.arange(num_rows, device=self.device)
        first_row, row_counts = table[:2]
        request = torch.searchsorted(first_row + row_counts, rows, right=True)
        written = request < batch_size
        request = request.clamp(max=batch_size - 1)
        place = rows - first_row[request]
        keep, loads = self._visible(table, request, place, heads)
        pages = planned._kv_indices_buf.long()
        if not len(pages):
            return torch.zeros_like(q_nope), q_nope.new_full(q_nope.shape[:2], -torch.inf), written
        cache = torch.cat([ckv_cache[pages], kpe_cache[pages]], dim=-1).flatten(0, 1)
        values, spoilt = finite_values(cache[:, :RANK], loads)
        queries = torch.cat([q_nope, q_pe], dim=-1).flatten(0, 1)[None, :, None]
        result, lse = attend(
            queries, cache[None, :, None], values[None, :, None],
            (keep & written[:, None, None]).flatten(0, 1)[None], scale=self._sm_scale,
        )  # fmt: skip
        result = result.view(num_rows, heads, RANK).masked_fill(spoilt[:, None, None], math.nan)
        return result, lse.view(num_rows, heads), written

    def _visible(
        self, table: torch.Tensor, request: torch.Tensor, place: torch.Tensor, heads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys that each row's heads attend to, [T, H, S], and those of its request, [T, S], of
        all pages end to end."""
        planned, (row_counts, first_page, key_counts) = self._planned(), table[1:]
        first_key = first_page * self._page_size
        num_keys = len(planned._kv_indices_buf) * self._page_size
        key = torch.arange(num_keys, device=self.device)
        offset = key - first_key[request].unsqueeze(1)
        end = key_counts[request].view(-1, 1)
        loads = (offset >= 0) & (offset < end)
        if self._causal:
            hidden_before = end - row_counts[request].view(-1, 1)
            packed = place.unsqueeze(1) * heads + torch.arange(heads, device=self.device)
            tile = planned._plan_info[0]
            tiles_end = (packed // tile + 1) * tile
            loaded = torch.minimum(end, hidden_before + tiles_end // heads)
            loaded = (loaded + KEY_TILE - 1) // KEY_TILE * KEY_TILE
            end = torch.minimum(loaded, hidden_before + place.unsqueeze(1) + 1)
        keep = loads.unsqueeze(1) & (offset.unsqueeze(1) < end.unsqueeze(2))
        return keep.expand(-1, heads, -1), loads

    def _check_module(
        self,
        rank: int | None,
        rope: int | None,
        q_dtype: torch.dtype | None,
        kv_dtype: torch.dtype | None,
        profiler: bool,
    ) -> None:
        if (rank, rope) != (RANK, ROPE) or profiler:
            raise NotImplementedError("the emulator has 512 + 64 dims and no profiler")
        if q_dtype not in DTYPES or kv_dtype != q_dtype:
            raise RuntimeError(f"no kernel compiles for {q_dtype} over {kv_dtype}")

    def _check_run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """What the library takes on trust, and gets wrong or dies of."""
        shapes = q_nope.shape[1:], q_pe.shape[1:], ckv_cache.shape[1:], kpe_cache.shape[1:]
        heads, page = self._num_heads, self._page_size
        if shapes != ((heads, RANK), (heads, ROPE), (page, RANK), (page, ROPE)):
            raise ValueError(f"{shapes} of heads and pages, planned were {heads} and {page}")
        planned_rows = self._planned().planned_rows
        if not planned_rows == len(q_nope) == len(q_pe):  # from 0.7.4 on
            raise ValueError(f"{len(q_nope)} rows, planned were {planned_rows}")
        given = (q_nope, q_pe, ckv_cache, kpe_cache)
        if any(tensor.dtype != self._dtype for tensor in given):
            raise ValueError(f"{[tensor.dtype for tensor in given]}, planned was {self._dtype}")
        if any(tensor.stride(-1) != 1 for tensor in (*given, out)):
            raise NotImplementedError("the values of a row must lie together")
        heads_apart = any(t.stride(1) * t.element_size() % 16 for t in (*given, out))
        if heads_apart or not all(map(Rows.is_aligned, (*given, out))):
            raise RuntimeError("CUDA error: misaligned address")
        if lse is not None and not lse.is_contiguous():
            raise NotImplementedError("the library writes LSE to other places")


def _check_pages(metadata: MLAPlanMetadata, page_size: int) -> None:
    for name, indptr in (("qo_indptr", metadata.qo_indptr), ("kv_indptr", metadata.kv_indptr)):
        if int(indptr[0]) or bool((indptr.diff() < 0).any()):
            raise ValueError(f"{name} metadata must start at zero and be nondecreasing.")
    counts = -(-metadata.kv_len_arr // page_size)
    if not torch.equal(counts, metadata.kv_indptr.diff()):
        raise ValueError("page counts in kv_indptr must equal ceil(kv_len_arr / page_size).")
    if int(metadata.kv_indptr[-1]) > len(metadata.kv_indices):
        raise ValueError("kv_indices has fewer entries than kv_indptr says.")


def _count_works(
    q_lens: torch.Tensor, kv_lens: torch.Tensor, num_heads: int, tile: int, *, causal: bool
) -> int:
    """Tiles of rows, each once for every stretch of keys that is one block's share."""
    tiles = -(-q_lens * num_heads // tile)
    request = torch.repeat_interleave(torch.arange(len(q_lens)), tiles)
    number = torch.arange(len(request)) - (tiles.cumsum(0) - tiles)[request]
    keys = kv_lens[request]
    if causal:
        ends = keys - q_lens[request] - (-(number + 1) * tile // num_heads)
        keys = torch.where(number + 1 == tiles[request], keys, ends.clamp(min=0).minimum(keys))
    shares = NUM_SMS * CTA_ROWS // tile
    share = _rounded_share(-(-int(keys.sum()) // shares))
    return int((-(-keys // share)).clamp(min=1).sum())


def _rounded_share(keys: int) -> int:
    for most, rounded in ((8, 32), (16, 64), (32, 128), (64, 192)):
        if keys <= most:
            return rounded
    return -(-keys // 256) * 256
