"""FlashAttention and FlashMLA, each called by hand as its users do, over a step's pool.

A function makes one call a layer; what prepares the step, as a plan, is done before. The answer of
a call is its output, [T, Hq, Dv], or a tuple that begins with it. `library` is the imported module.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from benchmarks.cases import RANK

from attnmux.testing.bench import Step
from attnmux.testing.bench.timing import Run

Cache = tuple[torch.Tensor, torch.Tensor]
Library = Any
"""A module."""


def answer(call: Run) -> torch.Tensor:
    """The output of a call."""
    found: Any = call()
    out: torch.Tensor = found if isinstance(found, torch.Tensor) else found[0]
    return out


def new_kv(step: Step) -> list[Cache]:
    """K and V of the new tokens in each layer, [T, Hkv, D], as the pool holds them; a latent's are
    its two parts."""
    loc = step.batch.out_cache_loc
    buffers = [step.pool.get_kv_buffer(layer.layer_id) for layer in step.layers]
    if step.v is not None:
        return [(keys[loc], values[loc]) for keys, values in buffers]
    rows = [keys[loc] for keys, _ in buffers]
    return [(row[..., :RANK].contiguous(), row[..., RANK:].contiguous()) for row in rows]


def writes(step: Step) -> list[Run]:
    """Each layer's write of the new tokens' K and V."""
    loc, pool = step.batch.out_cache_loc, step.pool
    layers = zip(step.layers, new_kv(step), strict=True)
    if step.v is None:
        return [partial(pool.set_mla_kv_buffer, layer, loc, *kv) for layer, kv in layers]
    return [partial(pool.set_kv_buffer, layer, loc, *kv, None, None) for layer, kv in layers]


def after_writes(step: Step, calls: Sequence[Run]) -> list[Run]:
    """The calls of an extend step, each after its layer's write; those of a decode step as is."""
    if step.workload.phase == "decode":
        return list(calls)

    def both(write: Run, call: Run) -> object:
        write()
        return call()

    return [partial(both, *each) for each in zip(writes(step), calls, strict=True)]


def whole_queries(step: Step) -> torch.Tensor:
    """A latent's Q as rows, [T, Hq, rank + rope], a copy."""
    return torch.cat([step.q, _rope(step)], dim=-1)


def fa3(library: Library, step: Step) -> list[Run]:
    q = step.q.unsqueeze(1) if is_decode(step) else step.q
    run = partial(library.flash_attn_with_kvcache, q, **_flash_attention(step))
    return [partial(run, k_cache=keys, v_cache=values) for keys, values in step.caches()]


def fa3_mla(library: Library, step: Step) -> list[Run]:
    """The rotary part as Q and K, the latent as a second query and as V."""
    q, q_rope = step.q, _rope(step)
    if is_decode(step):
        q, q_rope = q.unsqueeze(1), q_rope.unsqueeze(1)
    given = {**_flash_attention(step), "softmax_scale": scaling(step), "qv": q}
    run = partial(library.flash_attn_with_kvcache, q_rope, **given)
    return [
        partial(run, k_cache=rows[..., RANK:], v_cache=rows[..., :RANK])
        for rows, _ in step.caches()
    ]


def fa4(library: Library, step: Step) -> list[Run]:
    work = step.workload
    given: dict[str, Any] = {
        "cu_seqlens_q": bounds(step),
        "max_seqlen_q": work.new,
        "max_seqlen_k": work.keys,
        "seqused_k": step.batch.seq_lens,
        "page_table": step.pages,
        "softmax_scale": scaling(step),
        "causal": True,
        "num_splits": 1,
    }
    run = partial(library.flash_attn_varlen_func, step.q, **given)
    return [partial(run, k=keys, v=values) for keys, values in step.caches()]


def _flash_attention(step: Step) -> dict[str, Any]:
    given = {"cache_seqlens": step.batch.seq_lens, "page_table": step.pages, "causal": True}
    if is_decode(step):
        return given
    return {**given, "cu_seqlens_q": bounds(step), "max_seqlen_q": step.workload.new}


def flashmla(library: Library, step: Step) -> tuple[list[Run], list[Run]]:
    """Dense decode: with Q's parts put in one row where they come apart, and alone on such rows.

    library: `flash_mla`, which has a legacy half, or `sgl_kernel.flash_mla`.
    """
    lens, pages = step.batch.seq_lens, step.pages
    heads = step.layers[0].tp_q_head_num
    given: dict[str, Any] = {"softmax_scale": scaling(step), "causal": True}
    if _has_legacy(library):
        tiles, splits = library.get_mla_decoding_metadata(
            lens, heads, 1, is_fp8_kvcache=False, use_legacy=True
        )
        metadata, _ = library.get_mla_metadata()
        metadata.tile_scheduler_metadata, metadata.num_splits = tiles, splits
        given |= {"tile_scheduler_metadata": metadata, "use_legacy": True}
    else:
        tiles, splits = library.get_mla_metadata(lens, heads, 1, is_fp8_kvcache=False)
        given |= {"tile_scheduler_metadata": tiles, "num_splits": splits}

    def attend(rows: torch.Tensor, q: torch.Tensor) -> object:
        return library.flash_mla_with_kvcache(q.unsqueeze(1), rows, pages, lens, RANK, **given)

    def both(rows: torch.Tensor) -> object:
        return attend(rows, whole_queries(step))

    q, latents = whole_queries(step), [rows for rows, _ in step.caches()]
    return [partial(both, rows) for rows in latents], [partial(attend, rows, q) for rows in latents]


def flashmla_sparse(library: Library, step: Step) -> tuple[list[Run], list[Run]]:
    """Sparse attention: with the lookup of the slots that an indexer's places mean, and Q's parts
    put in one row where they come apart; and alone, on slots and rows that were made before."""
    picks = step.batch.topk_indices
    if picks is None:
        raise ValueError(f"{step.workload}: no picked keys")
    work, places = step.workload, step.slots.flatten()
    starts = torch.arange(work.batch_size, dtype=torch.int32, device=picks.device) * work.keys
    starts = starts.repeat_interleave(work.new).unsqueeze(1)
    legacy = {"use_legacy": True} if _has_legacy(library) else {}

    def attend(rows: torch.Tensor, q: torch.Tensor, indices: torch.Tensor) -> object:
        return library.flash_mla_sparse_fwd(
            q, rows.flatten(0, 1), indices.unsqueeze(1), scaling(step), RANK, **legacy
        )

    def both(rows: torch.Tensor) -> object:
        queries = whole_queries(step) if step.q.is_contiguous() else q
        return attend(rows, queries, places[starts + picks])

    q, indices = whole_queries(step), places[starts + picks]
    latents = [rows for rows, _ in step.caches()]
    alone: list[Run] = [partial(attend, rows, q, indices) for rows in latents]
    return [partial(both, rows) for rows in latents], alone


def _has_legacy(library: Library) -> bool:
    return str(library.__name__) == "flash_mla"


def is_decode(step: Step) -> bool:
    return step.workload.phase == "decode"


def scaling(step: Step) -> float:
    return step.layers[0].scaling


def bounds(step: Step) -> torch.Tensor:
    """[B + 1] int32: where each request's queries begin."""
    work, device = step.workload, step.q.device
    return torch.arange(0, work.num_tokens + 1, work.new, dtype=torch.int32, device=device)


def _rope(step: Step) -> torch.Tensor:
    if step.q_rope is None:
        raise ValueError(f"{step.workload}: no rotary part")
    return step.q_rope
