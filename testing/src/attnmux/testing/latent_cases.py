"""The cases of multi-head latent attention, over all keys and over those that an indexer picks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnmux.testing.cases import Case, decode, extend, verify
from attnmux.testing.naming import case_of

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
    yield case_of("mla-kv-in-pool", page, decode(45, 3), kv_in_pool=True, **latent)
    yield case_of("mla-unsaved", page, extend((0, 30), (0, 7)), save_kv_cache=False, **latent)
    long = extend((0, 300), (0, 70))
    settings: dict[str, Any] = {**latent, "save_kv_cache": False, "max_context_len": 512}
    yield case_of("mla-unsaved-long", page, long, **settings)
    yield case_of(
        "mla-expanded-prefill", page, extend((0, 30), (0, 7)), save_kv_cache=False, **expanded
    )


def nsa_cases(page: int) -> Iterator[Case]:
    """MLA over the keys that each layer's indexer picked: fewer than there are, or all."""
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
