"""Cases of attention with linear biases (ALiBi). Imports no torch.

A query's own place adds the same to all of its logits, which the softmax takes out again: only an
LSE, or a sink, shows that it is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attnmux.core import ForwardMode
from attnmux.testing.cases import Case, case_of, decode, extend, longest, verify


def alibi_cases(page: int) -> Iterator[Case]:
    """Every kind of step of layers with slopes, and each feature that goes with them."""
    slopes: dict[str, Any] = {"alibi": True}
    uneven, prefixes = decode(45, 3, 17, 70), extend((0, 41), (page + 3, 20), (2 * page, 1))
    features: dict[str, dict[str, Any]] = {
        "": {},
        "-lse": {"lse": True},
        "-window": {"windows": (8, None)},
        "-chunk-lse": {"attention_chunk": 16, "lse": True},
        "-sinks": {"sinks": True},
        "-scale": {"scaling": 0.3},
        "-8x8-heads": {"num_kv_heads": 8},
        "-14x2-heads": {"num_q_heads": 14},
        "-dim-64": {"head_dim": 64, "v_head_dim": 64},
        "-deterministic": {"kv_in_pool": True, "deterministic": True},
        "-float16": {"dtype": "float16"},
        "-float32-lse": {"dtype": "float32", "lse": True},
        "-fp8_e4m3": {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)},
        "-strided": {"strided_kv": True},
    }
    for name, settings in features.items():
        yield case_of(f"alibi-decode{name}", page, uneven, **slopes, **settings)
        yield case_of(f"alibi-extend{name}", page, prefixes, **slopes, **settings)
    yield from _steps(page, slopes)
    far: dict[str, Any] = {**slopes, "max_context_len": max(longest(page), 1152)}
    yield case_of("alibi-decode-long-lse", page, decode(1100, 513, 512, 1), lse=True, **far)
    yield case_of("alibi-extend-long-lse", page, extend((700, 130), (0, 260)), lse=True, **far)


def _steps(page: int, slopes: dict[str, Any]) -> Iterator[Case]:
    chain: dict[str, Any] = {"spec_topk": 1, **slopes}
    drafts = verify(4, 9, page, 2 * page + 1)
    catching_up = extend((20, 3), (page, 1), (9, 4), mode=ForwardMode.DRAFT_EXTEND)
    mixed = extend((0, 21), (40, 1), (17, 8), (5, 1), mode=ForwardMode.MIXED)
    yield case_of("alibi-mixed", page, mixed, **slopes)
    yield case_of("alibi-decode-padding", page, decode(20, 3, padding=3), **slopes)
    yield case_of("alibi-decode-lse-of-nothing", page, decode(0, 5), lse=True, **slopes)
    yield case_of("alibi-extend-unsaved-lse", page, extend((0, 30), (0, 7)),
                  save_kv_cache=False, lse=True, **slopes)  # fmt: skip
    yield case_of("alibi-extend-then-decode", page, extend((0, 30), (16, 11)), decode(31, 28),
                  **slopes)  # fmt: skip
    yield case_of("alibi-verify-chain", page, drafts, **chain)
    yield case_of("alibi-verify-chain-lse", page, drafts, lse=True, **chain)
    yield case_of("alibi-draft-extend", page, catching_up, **chain)
    pool: dict[str, Any] = {"window_pool": True, "windows": (8, None)}
    yield case_of("alibi-decode-window-pool", page, decode(45, 3, 2 * page + 30), **pool, **slopes)
