"""flashinfer, and TensorRT-LLM's kernels through it, called by hand. See `libraries.py`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.cases import RANK, ROPE
from benchmarks.libraries import Cache, Library, bounds, is_decode, new_kv, scaling

from attnmux.core import torch_dtype
from attnmux.testing.bench import Step
from attnmux.testing.bench.timing import Run

WORKSPACE_BYTES = 512 << 20


def flashinfer(library: Library, step: Step, *, backend: str = "fa3") -> list[Run]:
    """One call over the pool, which holds the new tokens. Decode uses tensor cores.

    backend: the prefill kernels.
    """
    if is_decode(step):
        wrapper = _decode_wrapper(library, step)
        wrapper.plan(*_plan_arguments(step), **_dtypes(step))
    else:
        wrapper = _paged_plan(library, step, step.workload.lengths, backend, causal=True)

    def run(cache: Cache) -> object:
        # Without `out` the library would fill one with zeros
        return wrapper.run(step.q, cache, out=torch.empty_like(step.q))

    return [partial(run, cache) for cache in step.caches()]


def flashinfer_merged(library: Library, step: Step, *, backend: str = "fa3") -> list[Run]:
    """An extend step as two calls and their merge: over its own K and V, and over the prefix."""
    q, new, prefix = step.q, step.workload.new, None
    tokens = bounds(step).cpu()
    ragged = library.BatchPrefillWithRaggedKVCacheWrapper(_space(step), "NHD", backend=backend)
    ragged.plan(tokens, tokens, *_heads(step)[:3], causal=True, **_dtypes(step))
    if step.workload.prefix:
        lens = [length - new for length in step.workload.lengths]
        prefix = _paged_plan(library, step, lens, backend, causal=False)

    def run(cache: Cache, kv: Cache) -> object:
        if prefix is None:
            return ragged.run(q, *kv, out=torch.empty_like(q))
        out, lse = ragged.run(q, *kv, return_lse=True)
        part = prefix.run(q, cache, out=torch.empty_like(q), return_lse=True)
        library.merge_state_in_place(out, lse, *part)
        return out

    layers = zip(step.caches(), new_kv(step), strict=True)
    return [partial(run, *layer) for layer in layers]


def flashinfer_mla(library: Library, step: Step, *, backend: str = "fa3") -> list[Run]:
    """Its MLA wrapper, with kernels for Hopper GPUs unless another backend is named."""
    mla = importlib.import_module(f"{library.__name__}.mla")
    wrapper = mla.BatchMLAPagedAttentionWrapper(_space(step), backend=backend)
    pages, indices, _ = _page_lists(step, step.workload.lengths)
    wrapper.plan(
        bounds(step).cpu(),
        pages,
        indices,
        step.batch.seq_lens_cpu,
        _heads(step)[0],
        RANK,
        ROPE,
        step.pool.page_size,
        not is_decode(step),
        scaling(step),
        *_dtypes(step).values(),
    )

    def run(rows: torch.Tensor) -> object:
        latents = rows[..., :RANK], rows[..., RANK:]
        return wrapper.run(step.q, step.q_rope, *latents, out=torch.empty_like(step.q))

    return [partial(run, rows.squeeze(2)) for rows, _ in step.caches()]


def _decode_wrapper(library: Library, step: Step) -> Any:  # noqa: ANN401  # the library's class
    return library.BatchDecodeWithPagedKVCacheWrapper(_space(step), "NHD", use_tensor_cores=True)


def _paged_plan(
    library: Library, step: Step, lens: Sequence[int], backend: str, *, causal: bool
) -> Any:  # noqa: ANN401  # the library's class
    """Over the first `lens` tokens of each request."""
    wrapper = library.BatchPrefillWithPagedKVCacheWrapper(_space(step), "NHD", backend=backend)
    lists = _page_lists(step, lens)
    wrapper.plan(bounds(step).cpu(), *lists, *_heads(step), causal=causal, **_dtypes(step))
    return wrapper


def _plan_arguments(step: Step) -> tuple[Any, ...]:
    return (*_page_lists(step, step.workload.lengths), *_heads(step))


def xqa(library: Library, step: Step) -> list[Run]:
    """TensorRT-LLM's decode kernel for SM90, through flashinfer."""
    decode = importlib.import_module(f"{library.__name__}.decode")
    pages = step.pages
    # Its counters have to be 0 before the first launch
    space = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=step.q.device)

    def run(cache: Cache) -> object:
        return decode.xqa_batch_decode_with_kv_cache(
            step.q,
            cache,
            space,
            pages,
            step.batch.seq_lens,
            step.workload.keys,
            bmm1_scale=scaling(step),
            bmm2_scale=1.0,
            out=torch.empty_like(step.q),
            kv_layout="NHD",
        )

    return [partial(run, cache) for cache in step.caches()]


def fmha_v2(library: Library, step: Step) -> tuple[list[Run], list[Run]]:
    """TensorRT-LLM's prefill kernel for SM90, through flashinfer. It reads a page's K and V
    from one tensor: with a copy of each layer's pages, and alone on copies made before."""
    prefill = importlib.import_module(f"{library.__name__}.prefill")
    q, work, lens = step.q, step.workload, step.batch.seq_lens
    space = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=q.device)
    starts, table = bounds(step), step.pages
    pages = table.flatten()
    key_starts = starts // work.new * work.keys
    # In the copy, a request's pages follow each other
    copied = torch.arange(len(pages), dtype=torch.int32, device=q.device).view_as(table)

    def attend(staged: torch.Tensor) -> object:
        return prefill.trtllm_fmha_v2_prefill(
            (q, staged),
            "Q_PAGED_KV_NHD",
            space,
            lens,
            work.new,
            work.keys,
            scaling(step),
            1.0,
            work.batch_size,
            starts,
            key_starts,
            block_tables=copied,
            out=torch.empty_like(q),
            mask_mode="causal",
        )

    def stage(cache: Cache, staged: torch.Tensor) -> torch.Tensor:
        for half, buffer in enumerate(cache):
            torch.index_select(buffer, 0, pages, out=staged[:, half])
        return staged

    caches = step.caches()
    shared = torch.empty((len(pages), 2, *caches[0][0].shape[1:]), dtype=q.dtype, device=q.device)

    def both(cache: Cache) -> object:
        return attend(stage(cache, shared))

    ready = [stage(cache, torch.empty_like(shared)) for cache in caches]
    return [partial(both, cache) for cache in caches], [partial(attend, each) for each in ready]


def _page_lists(step: Step, lens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bounds of each request's pages, on the host; the pages; tokens in the last page."""
    page, tokens = step.pool.page_size, torch.tensor(lens, dtype=torch.int32)
    counts = -(-tokens // page)
    starts = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    rows = zip(step.pages, counts.tolist(), strict=True)
    indices = torch.cat([row[:count] for row, count in rows])
    return starts, indices, (tokens - 1) % page + 1


def _heads(step: Step) -> tuple[int, int, int, int]:
    layer = step.layers[0]
    dims = layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim
    return (*dims, step.pool.page_size)


def _dtypes(step: Step) -> dict[str, torch.dtype]:
    stored = torch_dtype(step.request.kv_dtype or "")
    return {"q_data_type": step.q.dtype, "kv_data_type": stored}


def _space(step: Step) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=step.q.device)
