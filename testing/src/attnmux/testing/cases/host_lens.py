"""The cases of batches with host mirrors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnmux.core import ForwardMode
from attnmux.testing.cases.case import Case, Step, case_of, decode, extend, longest, verify
from attnmux.testing.cases.variants import LATENT


def with_host_lens(name: str, page: int, *steps: Step, **settings: Any) -> Case:  # noqa: ANN401  # as case_of
    """A case whose batches have host mirrors. settings: fields of `Case`."""
    return case_of(f"{name}-host-lens", page, *steps, host_lens=True, **settings)


def host_lens_cases(page: int) -> Iterator[Case]:
    """Batches with host mirrors, which engines give to every backend: one that does not need them
    may still take another path where it knows the lengths."""
    empty = extend((0, 41), (0, 1), (0, 20))
    steps: dict[str, tuple[Step, ...]] = {
        "decode-uneven": (decode(1, 70, 3, 33, 18),),
        "decode-changing-batch-size": (decode(9, 40, 22), decode(31), decode(2, 60, 17, 5)),
        "decode-padding": (decode(20, 3, padding=3),),
        "extend-empty-prefix": (empty,),
        "extend-prefix": (extend((page, 5), (3 * page, 19), (0, 11)),),
        "extend-nothing-new": (extend((2 * page, 0), (5, 0)), extend((0, 6), (0, 0))),
        "extend-padding": (extend((0, 9), (0, 20), padding=2, trailing=3),),
        "extend-then-decode": (extend((0, 30), (0, 11)), decode(31, 12)),
        "extend-in-chunks": (extend((0, 16), (0, 9)), extend((16, 16), (9, 1)), empty),
        "mixed-empty-prefix": (extend((0, 21), (0, 1), mode=ForwardMode.MIXED),),
        "extend-cross": (extend((0, 5), (0, 9), (0, 3), encoder=(12, 0, 30)),),
        "extend-multi-item": (extend((0, 22), (0, 28), items=((4, 6), (3, 5, 2))),),
    }
    for name, of_case in steps.items():
        yield with_host_lens(name, page, *of_case)
    features: dict[str, dict[str, Any]] = {
        "windows": {"windows": (8, None, 21)},
        "window-pool": {"window_pool": True, "windows": (8, None)},
        "chunk": {"attention_chunk": 16},
        "cap": {"logit_cap": 2.0},
        "sinks-lse": {"sinks": True, "lse": True},
        "scale-lse": {"scaling": 0.3, "lse": True},
        "kv-in-pool": {"kv_in_pool": True},
        "deterministic": {"kv_in_pool": True, "deterministic": True},
        "kv-scales": {"kv_scales": (0.5, 3.0)},
        "fp8_e4m3": {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)},
        "float16": {"dtype": "float16"},
        "float32-bfloat16-kv": {"dtype": "float32", "kv_dtype": "bfloat16"},
        "dims-192-128": {"num_kv_heads": 8, "head_dim": 192},
    }
    for name, settings in features.items():
        yield with_host_lens(f"extend-empty-prefix-{name}", page, empty, **settings)
    long = extend((0, 700), (0, 260))
    yield with_host_lens("extend-empty-prefix-long", page, long, max_context_len=1152)
    chain: dict[str, Any] = {"spec_topk": 1}
    yield with_host_lens("verify-chain", page, verify(4, 9, page, 2 * page + 1), **chain)
    yield with_host_lens("verify-empty-prefix", page, verify(3, 0, 0), **chain)
    yield with_host_lens("verify-tree", page, verify(6, 9, page), spec_topk=4)
    yield with_host_lens("verify-tree-empty-prefix", page, verify(6, 0, 0), spec_topk=4)
    tree: dict[str, Any] = {"spec_topk": 4, "tree_mask": "qlen_only"}
    yield with_host_lens("verify-tree-qlen", page, verify(6, 9, page), **tree)
    catching_up = extend((0, 3), (0, 1), mode=ForwardMode.DRAFT_EXTEND)
    yield with_host_lens("draft-extend-empty-prefix", page, catching_up, **chain)
    yield with_host_lens("mla-decode", page, decode(45, 3, 17, page), **LATENT)
    yield with_host_lens("mla-extend-empty-prefix", page, empty, **LATENT)
    yield from _mixed(page)


def _mixed(page: int) -> Iterator[Case]:
    """Mixed steps of which a backend may know, from the lengths on the host, what decodes."""
    last = extend((0, 21), (17, 8), (40, 1), (5, 1), mode=ForwardMode.MIXED)
    first = extend((40, 1), (3 * page, 1), (0, 21), (page, 8), mode=ForwardMode.MIXED)
    both = extend((40, 1), (0, 21), (5, 1), (0, 1), (9, 0), (33, 1), mode=ForwardMode.MIXED)
    rest = extend((40, 1), (5, 1), (0, 21), mode=ForwardMode.MIXED, padding=1, trailing=2)
    alone = extend((40, 1), (5, 1), mode=ForwardMode.MIXED)
    yield with_host_lens("mixed", page, last)
    yield with_host_lens("mixed-decode-first", page, first)
    yield with_host_lens("mixed-decode-around", page, both)
    yield with_host_lens("mixed-padding", page, rest)
    yield with_host_lens("mixed-then-decode", page, last, alone, decode(42, 7))
    features: dict[str, dict[str, Any]] = {
        "windows": {"windows": (8, None, 21)},
        "window-pool": {"window_pool": True, "windows": (8, None)},
        "chunk": {"attention_chunk": 16},
        "sinks-lse": {"sinks": True, "lse": True},
        "kv-in-pool": {"kv_in_pool": True},
        "deterministic": {"kv_in_pool": True, "deterministic": True},
        "fp8_e4m3": {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)},
        "dims-192-128": {"num_kv_heads": 8, "head_dim": 192},
    }
    for name, settings in features.items():
        yield with_host_lens(f"mixed-{name}", page, first, **settings)
    long = extend((1100, 1), (700, 1), (130, 60), (0, 5), mode=ForwardMode.MIXED)
    yield with_host_lens("mixed-long", page, long, max_context_len=max(longest(page), 1152))
    yield with_host_lens("mla-mixed", page, last, **LATENT)
