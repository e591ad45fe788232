"""Cases of MLA, sparse MLA, dual chunk attention, window pools and KV in 8-bit and 4-bit floats."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnmux.core import ForwardMode
from attnmux.testing.cases.case import Case, case_of, decode, extend, verify

EXPANDED: dict[str, Any] = {"num_q_heads": 16, "num_kv_heads": 16, "head_dim": 192}
LATENT: dict[str, Any] = {
    **EXPANDED,
    "kind": "mla",
    "num_kv_heads": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}


def mla_cases(page: int) -> Iterator[Case]:
    expanded, latent = EXPANDED, LATENT
    yield case_of("mla-decode", page, decode(45, 3, 17, page), **latent)
    yield case_of("mla-decode-lse", page, decode(45, 3), lse=True, **latent)
    yield case_of("mla-decode-128-heads", page, decode(30, 5), **{**latent, "num_q_heads": 128})
    yield case_of("mla-decode-padding", page, decode(20, 3, padding=2), **latent)
    yield case_of("mla-extend", page, extend((0, 30), (page, 7), (5, 1)), **latent)
    yield case_of("mla-verify-chain", page, verify(3, 12, page), spec_topk=1, **latent)
    yield case_of("mla-verify-tree", page, verify(5, 12, page), spec_topk=4, **latent)
    drafts = {"spec_topk": 4, "tree_mask": "qlen_only", **latent}
    yield case_of("mla-verify-tree-qlen", page, verify(9, 12, page), **drafts)
    yield case_of("mla-kv-in-pool", page, decode(45, 3), kv_in_pool=True, **latent)
    yield case_of("mla-unsaved", page, extend((0, 30), (0, 7)), save_kv_cache=False, **latent)
    long = extend((0, 300), (0, 70))
    settings: dict[str, Any] = {**latent, "save_kv_cache": False, "max_context_len": 512}
    yield case_of("mla-unsaved-long", page, long, **settings)
    yield case_of(
        "mla-expanded-prefill", page, extend((0, 30), (0, 7)), save_kv_cache=False, **expanded
    )
    # A chunk of a prefix, in the place of an encoder's tokens
    chunk = extend((0, 30), (0, 7), (0, 3), encoder=(40, 0, 11))
    yield case_of("mla-expanded-chunk", page, chunk, save_kv_cache=False, lse=True, **expanded)


def nsa_cases(page: int) -> Iterator[Case]:
    """MLA over the keys that each layer's indexer picks: some or all of them."""
    sparse: dict[str, Any] = {**LATENT, "kind": "nsa", "index_topk": 64}
    boundaries = tuple(length for length in (page - 1, page, page + 1, 3 * page) if length)
    uneven = decode(200, 3, 65, 64, 100)
    prefixes = extend((page + 90, 7), (0, 70), (5, 1))
    yield case_of("nsa-decode", page, uneven, **sparse)
    yield case_of("nsa-decode-lse", page, uneven, lse=True, **sparse)
    yield case_of("nsa-decode-page-boundaries", page, decode(*boundaries), **sparse)
    yield case_of(
        "nsa-decode-fewer-than-topk", page, decode(20, 1, 7), **{**sparse, "index_topk": 40}
    )
    yield case_of("nsa-decode-of-nothing", page, decode(90, 0, 5), lse=True, **sparse)
    yield case_of("nsa-decode-128-heads", page, decode(130, 5), **{**sparse, "num_q_heads": 128})
    yield case_of("nsa-decode-padding", page, decode(90, 3, padding=2), **sparse)
    yield case_of("nsa-decode-changing-batch-size", page, decode(9, 140, 22), decode(131), **sparse)
    yield case_of(
        "nsa-decode-deterministic", page, uneven, kv_in_pool=True, deterministic=True, **sparse
    )
    yield case_of("nsa-decode-sinks", page, uneven, sinks=True, lse=True, **sparse)
    yield case_of("nsa-extend-sinks", page, prefixes, sinks=True, lse=True, **sparse)
    yield case_of("nsa-extend", page, prefixes, **sparse)
    yield case_of("nsa-extend-lse", page, prefixes, lse=True, **sparse)
    yield case_of("nsa-extend-then-decode", page, prefixes, decode(page + 98, 71, 7), **sparse)
    yield case_of(
        "nsa-extend-full-prefix-hit", page, extend((2 * page, 1), (page, 0), (0, 4)), **sparse
    )
    trailing = extend((90, 9), (0, 20), padding=2, trailing=3)
    yield case_of("nsa-extend-padding", page, trailing, **sparse)
    yield case_of(
        "nsa-extend-unsaved", page, extend((0, 80), (0, 7)), save_kv_cache=False, **sparse
    )
    yield case_of("nsa-verify-chain", page, verify(3, 120, page), spec_topk=1, **sparse)
    scaled: dict[str, Any] = {**sparse, "kv_scales": (0.5, 3.0)}
    for kv_dtype in ("fp8_e4m3", "fp8_e5m2"):
        yield case_of(f"nsa-decode-{kv_dtype}", page, uneven, kv_dtype=kv_dtype, **scaled)
        yield case_of(f"nsa-extend-{kv_dtype}", page, prefixes, kv_dtype=kv_dtype, **scaled)


def dual_chunk_cases(page: int) -> Iterator[Case]:
    """Requests that end in the first chunk and in later ones. Chunks are whole pages, except in
    "uneven-chunks"; the longest request of a case has three or more."""
    c = -(-24 // page) * page
    chunks: dict[str, Any] = {"kind": "dual_chunk", "dual_chunk_len": c}
    each = decode(5, c + 9, 2 * c + 3, 3 * c + 17)
    ends = decode(c - 1, c, c + 1, 2 * c, 2 * c + 1, 3 * c, 3 * c + 1)
    yield case_of("dual-chunk-decode", page, each, **chunks)
    yield case_of("dual-chunk-decode-first-chunk", page, decode(3, c - 1, 1), **chunks)
    yield case_of("dual-chunk-decode-chunk-boundaries", page, ends, **chunks)
    yield case_of("dual-chunk-decode-length-0-and-1", page, decode(1, 0, 2 * c + 1), **chunks)
    yield case_of("dual-chunk-decode-padding", page, decode(2 * c + 5, 3, padding=3), **chunks)
    changing = decode(9, 2 * c + 4, c + 2), decode(3 * c), decode(2, c, 2 * c + 9, 5)
    yield case_of("dual-chunk-decode-changing-batch-size", page, *changing, **chunks)
    larger = decode(9, 2 * c), decode(2, c + 1, 17, 3 * c, 33), decode(10, 2 * c + 1)
    yield case_of(
        "dual-chunk-decode-larger-than-graphs", page, *larger, max_graph_batch_size=2, **chunks
    )

    prefixes = extend((c + 3, 5), (2 * c + 1, 9), (0, 11), (4, 2))
    across = extend((0, 3 * c + 5), (c - 2, 4), (c + 7, c))
    boundaries = extend((c, c), (0, c), (2 * c - 1, 1), (2 * c, 1), (c - 1, 2), (0, c + 1))
    yield case_of("dual-chunk-extend-prefix", page, prefixes, **chunks)
    yield case_of("dual-chunk-extend-across-chunks", page, across, **chunks)
    yield case_of("dual-chunk-extend-chunk-boundaries", page, boundaries, **chunks)
    hits = extend((2 * c, 1), (c, 0), (0, 4)), extend((2 * c, 0), (5, 0))
    yield case_of("dual-chunk-extend-nothing-new", page, *hits, **chunks)
    shared = extend((2 * c, 5), (2 * c, 9), (2 * c, c), shared_prefix=2 * c)
    yield case_of("dual-chunk-extend-shared-prefix", page, shared, **chunks)
    padded = extend((c + 4, 9), (0, 2 * c + 2), padding=2, trailing=3)
    yield case_of("dual-chunk-extend-padding", page, padded, **chunks)
    mixed = extend((0, 2 * c + 1), (3 * c - 1, 1), (17, c), (5, 1), mode=ForwardMode.MIXED)
    yield case_of("dual-chunk-mixed", page, mixed, **chunks)
    then = extend((0, c - 1), (2 * c, 11)), decode(c, 2 * c + 12), decode(c + 1, 2 * c + 13)
    yield case_of("dual-chunk-extend-then-decode", page, *then, **chunks)
    unsaved = extend((0, 2 * c + 7), (0, 5), (0, 0), (0, c + 1))
    yield case_of("dual-chunk-extend-unsaved", page, unsaved, save_kv_cache=False, **chunks)

    features: dict[str, dict[str, Any]] = {
        "lse": {"lse": True},
        "scale": {"scaling": 0.3},
        "kv-in-pool": {"kv_in_pool": True},
        "float16": {"dtype": "float16"},
        "dim-64": {"head_dim": 64, "v_head_dim": 64},
        "14x2-heads": {"num_q_heads": 14},
        "uneven-chunks": {"dual_chunk_len": page + 1 if page > 1 else 7},
    }
    for name, settings in features.items():
        of_case = {**chunks, **settings}
        yield case_of(f"dual-chunk-decode-{name}", page, each, **of_case)
        yield case_of(f"dual-chunk-extend-{name}", page, across, **of_case)
    yield case_of("dual-chunk-decode-lse-of-nothing", page, decode(0, c), lse=True, **chunks)
    yield case_of("dual-chunk-idle", page, each, extend(mode=ForwardMode.IDLE), **chunks)


def window_pool_cases(page: int) -> Iterator[Case]:
    """Layers with a window have a pool of their own, with other slots."""
    pool: dict[str, Any] = {"window_pool": True, "windows": (8, None)}
    long = 2 * page + 30
    yield case_of("decode-window-pool", page, decode(45, 3, long, 9), **pool)
    yield case_of("decode-window-pool-padding", page, decode(long, 3, padding=3), **pool)
    growing = extend((0, 41), (page + 3, 20), (long, 5))
    yield case_of("extend-window-pool", page, growing, **pool)
    shared = extend((2 * page, 5), (2 * page, 9), shared_prefix=2 * page)
    yield case_of("extend-window-pool-shared-prefix", page, shared, **pool)
    yield case_of("extend-then-decode-window-pool", page, growing, decode(42, page + 24), **pool)
    two: dict[str, Any] = {**pool, "windows": (None, 8, 21, None)}
    yield case_of("decode-two-windows-pool", page, decode(45, 3, long), **two)
    yield case_of("extend-two-windows-pool", page, growing, **two)
    chain = verify(4, 9, page, long)
    yield case_of("verify-window-pool", page, chain, spec_topk=1, **pool)
    yield case_of("decode-window-pool-sinks", page, decode(45, 3, long), sinks=True, **pool)
    yield case_of("extend-window-pool-kv-in-pool", page, growing, kv_in_pool=True, **pool)
    scaled: dict[str, Any] = {**pool, "kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)}
    yield case_of("decode-window-pool-fp8_e4m3", page, decode(45, 3, long), **scaled)
    yield case_of("extend-window-pool-fp8_e4m3", page, growing, **scaled)


FP8_LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "fp8_e4m3fnuz": 240.0}
"""The largest finite value of each 8-bit format."""


def fp8_cases(page: int) -> Iterator[Case]:
    """KV in 8-bit floats. Attention reads all keys from the pool, the new ones too."""
    scales: dict[str, Any] = {"kv_scales": (0.5, 3.0)}
    for kv_dtype, largest in FP8_LARGEST.items():
        variants: dict[str, dict[str, Any]] = {
            "": {},
            "-dim-64": {"head_dim": 64, "v_head_dim": 64},
            "-scales": scales,
            "-scales-lse": {**scales, "lse": True},
            # Saturates the first layer's K beyond 2 and its V beyond 1.5
            "-saturated": {"kv_scales": (2 / largest, 1.5 / largest)},
            "-kv-in-pool": {**scales, "kv_in_pool": True},
            "-window": {**scales, "windows": (8, None)},
            "-float16": {**scales, "dtype": "float16"},
        }
        for name, settings in variants.items():
            of_case: dict[str, Any] = {"kv_dtype": kv_dtype, **settings}
            yield case_of(f"decode-{kv_dtype}{name}", page, decode(45, 3, 17, 70), **of_case)
            yield case_of(
                f"extend-{kv_dtype}{name}", page, extend((0, 41), (page + 3, 20)), **of_case
            )
        scaled: dict[str, Any] = {"kv_dtype": kv_dtype, **scales}
        chain, tree = verify(4, 9, page, 2 * page + 1), verify(6, 9, page)
        yield case_of(f"verify-{kv_dtype}", page, chain, kv_dtype=kv_dtype, spec_topk=1)
        yield case_of(f"verify-{kv_dtype}-scales", page, chain, spec_topk=1, **scaled)
        yield case_of(f"verify-{kv_dtype}-tree", page, tree, spec_topk=4, **scaled)
        latent: dict[str, Any] = {**LATENT, **scaled}
        yield case_of(f"mla-decode-{kv_dtype}", page, decode(45, 3, 17, page), **latent)
        yield case_of(f"mla-extend-{kv_dtype}", page, extend((0, 30), (page, 7)), **latent)
        yield case_of(f"mla-verify-{kv_dtype}", page, verify(3, 12, page), spec_topk=1, **latent)


def fp4_cases(page: int) -> Iterator[Case]:
    """KV in 4-bit floats, whose blocks have scales of their own."""
    fp4: dict[str, Any] = {"kv_dtype": "fp4_e2m1"}
    scaled: dict[str, Any] = {**fp4, "kv_scales": (0.5, 3.0)}
    variants: dict[str, dict[str, Any]] = {
        "": fp4,
        "-dim-64": {**fp4, "head_dim": 64, "v_head_dim": 64},
        "-dim-80": {**scaled, "head_dim": 80, "v_head_dim": 80},
        "-dim-192-128": {**scaled, "head_dim": 192, "v_head_dim": 128},
        "-dim-256": {**scaled, "head_dim": 256, "v_head_dim": 256},
        "-scales-lse": {**scaled, "lse": True},
        # Saturates scales of blocks: the first layer's K beyond 2 and its V beyond 1.5
        "-saturated": {**fp4, "kv_scales": (2 / (6 * 448), 1.5 / (6 * 448))},
        "-kv-in-pool": {**scaled, "kv_in_pool": True},
        "-window": {**scaled, "windows": (8, None)},
        "-chunk": {**scaled, "attention_chunk": 16},
        "-sinks": {**scaled, "sinks": True},
        "-cap": {**scaled, "logit_cap": 30.0},
        "-float16": {**scaled, "dtype": "float16"},
    }
    long, growing = decode(45, 3, 17, 70), extend((0, 41), (page + 3, 20))
    for name, settings in variants.items():
        yield case_of(f"decode-fp4_e2m1{name}", page, long, **settings)
        yield case_of(f"extend-fp4_e2m1{name}", page, growing, **settings)
    chain, tree = verify(4, 9, page, 2 * page + 1), verify(6, 9, page)
    yield case_of("verify-fp4_e2m1", page, chain, spec_topk=1, **fp4)
    yield case_of("verify-fp4_e2m1-scales", page, chain, spec_topk=1, **scaled)
    yield case_of("verify-fp4_e2m1-tree", page, tree, spec_topk=4, **scaled)
    catching_up = extend((9, 3), (page, 1), (0, 4), mode=ForwardMode.DRAFT_EXTEND)
    yield case_of("draft-extend-fp4_e2m1", page, catching_up, spec_topk=1, **scaled)
    yield case_of("decode-fp4_e2m1-nan", page, decode(45, 3, 17), nan_request=1, **scaled)
    yield case_of("extend-fp4_e2m1-nan", page, growing, nan_request=1, **scaled)
    encoders = extend((0, 20), (3, 9), encoder=(30, 7))
    yield case_of("extend-cross-fp4_e2m1", page, encoders, **scaled)
    window: dict[str, Any] = {**scaled, "window_pool": True, "windows": (8, None)}
    yield case_of("decode-window-pool-fp4_e2m1", page, decode(45, 3, 2 * page + 9), **window)
