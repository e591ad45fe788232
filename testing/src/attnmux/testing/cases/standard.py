"""The standard cases. Every backend runs those that its card admits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from attnmux.core import ForwardMode
from attnmux.testing.cases.biases import alibi_cases, relative_cases, relative_encoders
from attnmux.testing.cases.case import Case, Step, case_of, decode, extend, longest, verify
from attnmux.testing.cases.engines import engine_cases
from attnmux.testing.cases.host_lens import host_lens_cases, with_host_lens
from attnmux.testing.cases.steady import steady_cases
from attnmux.testing.cases.variants import (
    LATENT,
    dual_chunk_cases,
    fp4_cases,
    fp8_cases,
    mla_cases,
    nsa_cases,
    window_pool_cases,
)

PAGE_SIZES = (1, 16, 64)

ODD_PAGE_SIZES = (3, 48)
"""Not powers of two, for backends with any page size."""


def standard_cases(page_sizes: Sequence[int] = PAGE_SIZES) -> tuple[Case, ...]:
    """Every case of the suite, in each of the page sizes."""
    cases = [case for page in page_sizes for case in _in_pages(page)]
    for page in sorted(set(ODD_PAGE_SIZES).difference(page_sizes)):
        cases += _in_odd_pages(page)
    return (*cases, *_encoders())


# Many backends have many page sizes in common, and making a case takes longer than looking it up.
@lru_cache(maxsize=64)
def _in_pages(page: int) -> tuple[Case, ...]:
    makers = (
        *(_batches, _long_requests, _speculation, _features, _shapes),
        *(mla_cases, nsa_cases, dual_chunk_cases, fp8_cases, fp4_cases, window_pool_cases),
        *(alibi_cases, relative_cases, _nan, _strided),
        *(host_lens_cases, engine_cases, steady_cases),
    )
    return tuple(case for make in makers for case in make(page))


@cache
def _in_odd_pages(page: int) -> tuple[Case, ...]:
    return (
        case_of("decode-uneven", page, decode(1, 70, 3, 33, 18)),
        case_of("extend-prefix", page, extend((page, 5), (2 * page + 1, 19))),
    )


@cache
def _encoders() -> tuple[Case, ...]:
    """An encoder has no KV cache, so that the page size does not matter."""
    encoder: dict[str, Any] = {"is_encoder": True, "save_kv_cache": False}
    return (
        case_of("encoder", 1, extend((0, 41), (0, 1), (0, 20)), **encoder),
        case_of("encoder-nan", 1, extend((0, 20), (0, 5), (0, 41)), nan_request=1, **encoder),
        case_of("encoder-dim-64", 1, extend((0, 70)), head_dim=64, v_head_dim=64, **encoder),
        *relative_encoders(encoder),
    )


def in_graphs(cases: Sequence[Case]) -> tuple[Case, ...]:
    """The cases with a step that a device graph can serve, as cases that run from graphs."""
    return tuple(found for case in cases if (found := _in_graph(case)) is not None)


@lru_cache(maxsize=8192)
def _in_graph(case: Case) -> Case | None:
    if not any(step.can_be_captured for step in case.steps):
        return None
    return replace(case, name=f"{case.name}-graph", graph=True)


def _batches(page: int) -> Iterator[Case]:
    most = longest(page)
    boundaries = tuple(length for length in (page - 1, page, page + 1, 3 * page) if length)
    steps: dict[str, tuple[Step, ...]] = {
        "decode-one-request": (decode(37),),
        "decode-uneven": (decode(1, 70, 3, 33, 18),),
        "decode-changing-batch-size": (decode(9, 40, 22), decode(31), decode(2, 60, 17, 5)),
        "decode-page-boundaries": (decode(*boundaries),),
        "decode-length-0-and-1": (decode(1, 0, 21),),
        "decode-max-length": (decode(most, most - 1),),
        "decode-padding": (decode(20, 3, padding=3),),
        "extend-one-request": (extend((0, 37)),),
        "extend-empty-prefix": (extend((0, 7), (0, 33), (0, 1)),),
        "extend-prefix": (extend((page, 5), (3 * page, 19), (0, 11)),),
        "extend-partly-filled-page": (extend((page + page // 2 + 1, 12), (3, 30)),),
        "extend-page-boundaries": (extend(*((0, length) for length in boundaries)),),
        "extend-full-prefix-hit": (extend((2 * page, 1), (page, 0), (0, 4)),),
        "extend-nothing-new": (extend((2 * page, 0), (5, 0)), extend((0, 6), (page, 2))),
        "extend-length-1": (extend((0, 1)), extend((0, 1), (0, 1))),
        "extend-max-length": (extend((most - 64, 64), (0, 9)),),
        "extend-padding": (extend((4, 9), (0, 20), padding=2, trailing=3),),
        "extend-shared-prefix": (
            extend((4 * page, 5), (4 * page, 9), (4 * page, 1), shared_prefix=4 * page),
        ),
        "mixed": (extend((0, 21), (40, 1), (17, 8), (5, 1), mode=ForwardMode.MIXED),),
        "extend-then-decode": (extend((0, 30), (16, 11)), decode(31, 28)),
        "idle": (decode(7, 12), extend(mode=ForwardMode.IDLE)),
    }
    for name, of_case in steps.items():
        yield case_of(name, page, *of_case)
    larger = decode(9, 40), decode(2, 60, 17, 5, 33), decode(10, 41)
    yield case_of("decode-larger-than-graphs", page, *larger, max_graph_batch_size=2)


def _long_requests(page: int) -> Iterator[Case]:
    """For kernels that split the keys of one request and merge the results: a sink must count once,
    and the LSE must be that of all splits."""
    far = max(longest(page), 1152)
    yield case_of("decode-long", page, decode(1100, 513, 512, 1), max_context_len=far)
    yield case_of("extend-long", page, extend((700, 130), (0, 260)), max_context_len=far)
    features: dict[str, dict[str, Any]] = {
        "deterministic": {"kv_in_pool": True, "deterministic": True},
        "sinks-lse": {"sinks": True, "lse": True},
        "cap-lse": {"logit_cap": 2.0, "lse": True},
        "windows": {"windows": (600, None, 8)},
        "chunk": {"attention_chunk": 512},
        "fp8_e4m3": {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)},
    }
    for name, settings in features.items():
        steps = decode(1100, 5, 700)
        yield case_of(f"decode-long-{name}", page, steps, max_context_len=far, **settings)
    chunks: dict[str, Any] = {"attention_chunk": 128, "max_context_len": far}
    yield case_of("decode-long-chunk-borders", page, decode(1, 128, 129, 512, 0), **chunks)
    across = extend((100, 300), (0, 260), (128, 1), (127, 2), (300, 0))
    yield case_of("extend-long-chunk", page, across, **chunks)
    yield with_host_lens("extend-long-chunk-empty-prefix", page, extend((0, 300), (0, 7)), **chunks)
    yield case_of(
        "mixed-long-chunk",
        page,
        extend((511, 1), (0, 130), mode=ForwardMode.MIXED, padding=1),
        **chunks,
    )
    drafts: dict[str, Any] = {"spec_topk": 1, "lse": True}
    yield case_of("verify-long", page, verify(4, 1000, 7), max_context_len=far, **drafts)


def _speculation(page: int) -> Iterator[Case]:
    chain: dict[str, Any] = {"spec_topk": 1}
    tree: dict[str, Any] = {"spec_topk": 4}
    yield case_of("verify-chain", page, verify(4, 9, page, 2 * page + 1), **chain)
    yield case_of("verify-empty-prefix", page, verify(3, 0, 5), **chain)
    yield case_of("verify-padding", page, verify(4, 9, 30, padding=2), **chain)
    yield case_of("verify-tree", page, verify(6, 9, page, 2 * page + 1), **tree)
    yield case_of("verify-tree-padding", page, verify(6, 30, 11, padding=2), **tree)
    yield case_of("verify-tree-window", page, verify(6, 40, 11), windows=(8, None), **tree)
    yield case_of("verify-tree-chunk", page, verify(6, 30, 13), attention_chunk=16, **tree)
    yield from _trees_by_drafts(page)
    # On one backend, the second mode's graphs need larger buffers than the first's
    growing = decode(9, 40), verify(4, 9, 30, page, 1, 17), decode(41, 10), verify(4, 21, 34, 5)
    yield case_of("decode-and-verify", page, *growing, **chain)
    growing = verify(3, 9, 30), decode(9, 40, 2, 33, 5), verify(3, 8, 16), decode(41, 10, 3)
    yield case_of("verify-and-decode", page, *growing, **chain)
    larger = verify(4, 9, 30), verify(4, 2, 60, 17, 5, 33), verify(4, 20, 3)
    yield case_of("verify-larger-than-graphs", page, *larger, max_graph_batch_size=2, **chain)
    yield case_of("verify-tree-larger-than-graphs", page, *larger, max_graph_batch_size=2, **tree)
    catching_up = extend((20, 3), (page, 1), (9, 4), mode=ForwardMode.DRAFT_EXTEND)
    yield case_of("draft-extend", page, catching_up, **chain)


def _trees_by_drafts(page: int) -> Iterator[Case]:
    """Trees whose masks are between drafts alone. Windows and chunks count positions."""
    tree: dict[str, Any] = {"spec_topk": 4, "tree_mask": "qlen_only"}
    bits: dict[str, Any] = {**tree, "tree_mask": "qlen_only_bitpacking"}
    yield case_of("verify-tree-qlen", page, verify(6, 9, page, 2 * page + 1), **tree)
    yield case_of("verify-tree-qlen-padding", page, verify(9, 30, 0, padding=2), **tree)
    yield case_of("verify-tree-bits", page, verify(11, 9, page, 2 * page + 1), **bits)
    larger = verify(4, 9, 30), verify(4, 2, 60, 17, 5, 33), verify(4, 20, 3)
    eager: dict[str, Any] = {**tree, "max_graph_batch_size": 2}
    yield case_of("verify-tree-qlen-larger-than-graphs", page, *larger, **eager)
    yield case_of("verify-tree-qlen-window", page, verify(6, 40, 11), windows=(8, None), **tree)
    # Some nodes do not see the root
    narrow: dict[str, Any] = {**tree, "windows": (2, None)}
    yield case_of("verify-tree-qlen-narrow-window", page, verify(12, 40, 1, page), **narrow)
    yield case_of("verify-tree-bits-chunk", page, verify(12, 30, 13), attention_chunk=4, **bits)


def _features(page: int) -> Iterator[Case]:
    features: dict[str, dict[str, Any]] = {
        "window": {"windows": (8, None)},
        "window-of-a-page": {"windows": (page, None)},
        "two-windows": {"windows": (8, None, 21)},
        "chunk": {"attention_chunk": 16},
        "cap": {"logit_cap": 2.0},
        "sinks": {"sinks": True},
        "scale": {"scaling": 0.3},
        "lse": {"lse": True},
        "sinks-lse": {"sinks": True, "lse": True},
        "window-sinks": {"windows": (12, None), "sinks": True},
        "window-cap": {"windows": (12, None), "logit_cap": 2.0},
        "kv-in-pool": {"kv_in_pool": True},
        "deterministic": {"kv_in_pool": True, "deterministic": True},
        "kv-scales": {"kv_scales": (0.5, 3.0)},
        "float16": {"dtype": "float16"},
        "float32": {"dtype": "float32"},
        "float32-bfloat16-kv": {"dtype": "float32", "kv_dtype": "bfloat16"},
    }
    for name, settings in features.items():
        yield case_of(f"decode-{name}", page, decode(45, 3, 17, 70), **settings)
        yield case_of(f"extend-{name}", page, extend((0, 41), (page + 3, 20)), **settings)
    yield case_of("decode-lse-of-nothing", page, decode(0, 5), lse=True)
    yield case_of("decode-sinks-lse-of-nothing", page, decode(0, 5), lse=True, sinks=True)
    yield case_of("extend-cross", page, extend((0, 5), (0, 9), (7, 3), encoder=(12, 0, 30)))
    unsaved = extend((0, 5), (0, 9), (0, 3), encoder=(12, 0, 30))
    yield case_of("extend-cross-unsaved", page, unsaved, save_kv_cache=False)
    yield case_of("decode-cross", page, decode(6, 1, 10, encoder=(12, 0, 30)))
    yield case_of("extend-multi-item", page, extend((0, 22), (16, 12), items=((4, 6), (3, 5, 2))))


def _shapes(page: int) -> Iterator[Case]:
    shapes: dict[str, dict[str, Any]] = {
        "8x8-heads": {"num_q_heads": 8, "num_kv_heads": 8},
        "8x1-heads": {"num_q_heads": 8, "num_kv_heads": 1},
        "16x2-heads": {"num_q_heads": 16, "num_kv_heads": 2},
        "14x2-heads": {"num_q_heads": 14, "num_kv_heads": 2},
        "dim-64": {"head_dim": 64, "v_head_dim": 64},
        "dim-256": {"head_dim": 256, "v_head_dim": 256},
        "dims-192-128": {"num_kv_heads": 8, "head_dim": 192},
    }
    for name, settings in shapes.items():
        yield case_of(f"decode-{name}", page, decode(45, 3), **settings)
        yield case_of(f"extend-{name}", page, extend((0, 41), (page, 7)), **settings)


def _nan(page: int) -> Iterator[Case]:
    """NaN in one request of the first step, whose zeroed pages a request of the next step gets."""
    after = decode(20, 31, 5)
    between: dict[str, Any] = {"nan_request": 1}
    prefixes = extend((0, 21), (page + 3, 5), (0, 9))
    yield case_of("decode-nan", page, decode(45, 17, 3, 9), after, **between)
    yield case_of("extend-nan", page, prefixes, after, **between)
    prompts = extend((0, 9), (0, 5), (0, 21))
    # Some backends serve prompts alone
    again = extend((0, 20), (0, 31), (0, 5))
    yield case_of("prompts-nan", page, prompts, again, host_lens=True, **between)
    yield case_of("mla-unsaved-nan", page, prompts, save_kv_cache=False, **LATENT, **between)
    yield case_of("mla-extend-nan", page, prefixes, after, **LATENT, **between)
    yield case_of("mla-decode-nan", page, decode(45, 17, 3), after, **LATENT, **between)


def _strided(page: int) -> Iterator[Case]:
    """The cache of an engine that keeps K and V of a slot side by side."""
    between: dict[str, Any] = {"strided_kv": True}
    drafts: dict[str, Any] = {"spec_topk": 1, **between}
    prefixes = extend((page, 5), (3 * page, 19), (0, 11))
    far: dict[str, Any] = {"max_context_len": max(longest(page), 1152)}
    fp8: dict[str, Any] = {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)}
    yield case_of("strided-decode", page, decode(1, 70, 3, 33, 18), **between)
    yield case_of("strided-decode-long", page, decode(1100, 5, 700), **far, **between)
    yield case_of("strided-decode-fp8_e4m3", page, decode(45, 3, 17), **fp8, **between)
    yield case_of("strided-extend", page, prefixes, **between)
    yield case_of("strided-verify-chain", page, verify(4, 40, 7, page), **drafts)
    yield case_of("strided-mla-decode", page, decode(45, 3, 17, page), **LATENT, **between)
    yield case_of("strided-mla-extend", page, prefixes, **LATENT, **between)
