"""What TensorRT-LLM's kernels find in memory: raw rows, paged keys, counters that must be 0."""

from __future__ import annotations

import torch

from attnmux.emulators.nvidia.dense import library

COUNTER_BYTES = 8 * 1024 * 1024
"""Front of a workspace that holds the counters of requests which several blocks share."""

E4M3 = torch.float8_e4m3fn


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a kernel sees it that takes an address and no strides."""
    strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.as_strided(tensor.shape, strides)


def split(
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], kv_layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [pages, page, Hkv, D], views."""
    k_cache, v_cache = kv_cache if isinstance(kv_cache, tuple) else kv_cache.unbind(dim=1)
    if kv_layout == "HND":
        return k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    return k_cache, v_cache


def int32(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The kernels read 32-bit integers, whatever the tensor's dtype."""
    if tensor.dtype != torch.int32:
        raise RuntimeError(f"{name} is read as int32, and is {tensor.dtype}")
    return raw(tensor).long()


def paged(
    cache: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor, *, tile: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows [B, S, Hkv, D] that tables [B, M] lead to, in float64, and [B, S] which are keys.

    tile: rows that are loaded at once. After the last token, rows of its tile have weight 0, which
    makes no zero of values that are not finite; later rows are not loaded. An entry of a table that
    is no page gives NaN, where a kernel would fault.
    """
    rows, there = torch.ops.attnmux_emulated.paged(cache, tables, lens, tile)
    return rows, there


def _paged(
    cache: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor, tile: int
) -> tuple[torch.Tensor, torch.Tensor]:
    page_size, most = cache.shape[1], tables.shape[1] * cache.shape[1]
    # Indexing knows no 8-bit floats.
    words = cache.view(torch.uint8) if cache.dtype == E4M3 else cache
    rows = cache.new_zeros((len(tables), most, *cache.shape[2:]), dtype=torch.float64)
    loaded = (lens + tile - 1).div(tile, rounding_mode="floor").mul(tile).clamp(0, most)
    for request, count in enumerate(loaded.tolist()):
        pages = tables[request, : -(-count // page_size)]
        is_page = (pages >= 0) & (pages < len(cache))
        found = words[pages.clamp(0, len(cache) - 1)].view(cache.dtype).double()
        found[~is_page] = torch.nan
        rows[request, :count] = found.flatten(0, 1)[:count]
    return rows, torch.arange(most, device=lens.device) < lens.unsqueeze(1)


library.define("paged(Tensor cache, Tensor tables, Tensor lens, int tile) -> (Tensor, Tensor)")  # type: ignore[no-untyped-call]  # torch's
library.impl("paged", _paged, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # as above


def visible(
    there: torch.Tensor,
    num_queries: int,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    window_left: int,
) -> torch.Tensor:
    """[B, Tq, S]: causal, counted from the end of the keys; window_left keys before a token."""
    key = torch.arange(there.shape[1], device=there.device)
    query = torch.arange(num_queries, device=there.device)
    position = (query + (kv_lens - q_lens).unsqueeze(1)).unsqueeze(2)
    keep = there.unsqueeze(1) & (key <= position) & (query < q_lens.unsqueeze(1)).unsqueeze(2)
    return keep if window_left < 0 else keep & (key >= position - window_left)


def spoiled(
    out: torch.Tensor, keep: torch.Tensor, workspace: torch.Tensor, num_counters: int
) -> torch.Tensor:
    """out [B, Tq, Hq, Dv] with NaN where a kernel gives anything.

    A row without keys is divided by 0. Where counters were not left at 0, no block
    finds that it is the last, and none writes.
    """
    nbytes = workspace.numel() * workspace.element_size()
    if nbytes <= COUNTER_BYTES:
        raise RuntimeError(f"an illegal memory access: {nbytes} bytes of workspace, with counters")
    counters = workspace.view(torch.uint8)[: min(4 * num_counters, COUNTER_BYTES)]
    nothing = ~keep.any(-1)[..., None, None] | (counters != 0).any()
    return out.masked_fill(nothing, torch.nan)


def e4m3(rows: torch.Tensor) -> torch.Tensor:
    """Rounded and saturated."""
    return rows.float().clamp(-448, 448).to(E4M3)
