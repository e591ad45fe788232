"""Cases of attention with relative position biases (T5). Imports no torch.

Tables reach less far than most requests, so that distances beyond them are clipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attnmux.core import ForwardMode
from attnmux.testing.cases import Case, case_of, decode, extend, longest, verify

REACH = 12


def relative_cases(page: int) -> Iterator[Case]:
    """Every kind of step of causal layers with a table, and each feature that goes with them."""
    table: dict[str, Any] = {"relative_reach": REACH}
    uneven, prefixes = decode(45, 3, 17, 70), extend((0, 41), (page + 3, 20), (2 * page, 1))
    features: dict[str, dict[str, Any]] = {
        "": {},
        "-lse": {"lse": True},
        "-unscaled": {"scaling": 1.0, "head_dim": 64, "v_head_dim": 64},
        "-reach-0-lse": {"relative_reach": 0, "lse": True},
        "-reach-128": {"relative_reach": 128},
        "-window": {"windows": (8, None)},
        "-chunk": {"attention_chunk": 16},
        "-sinks": {"sinks": True},
        "-8x8-heads": {"num_kv_heads": 8},
        "-14x2-heads": {"num_q_heads": 14},
        "-deterministic": {"kv_in_pool": True, "deterministic": True},
        "-float16": {"dtype": "float16"},
        "-float32-lse": {"dtype": "float32", "lse": True},
        "-fp8_e4m3": {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)},
        "-strided": {"strided_kv": True},
    }
    for name, settings in features.items():
        given = {**table, **settings}
        yield case_of(f"relative-decode{name}", page, uneven, **given)
        yield case_of(f"relative-extend{name}", page, prefixes, **given)
    yield from _steps(page, table)
    far: dict[str, Any] = {"relative_reach": 128, "max_context_len": max(longest(page), 1152)}
    yield case_of("relative-decode-long-lse", page, decode(1100, 513, 512, 1), lse=True, **far)
    yield case_of("relative-extend-long-lse", page, extend((700, 130), (0, 260)), lse=True, **far)


def relative_encoders(encoder: Mapping[str, Any]) -> Iterator[Case]:
    """Layers whose tables have both sides. encoder: the settings of every encoder's case."""
    uneven = extend((0, 41), (0, 1), (0, 20))
    features: dict[str, dict[str, Any]] = {
        "": {},
        "-reach-0": {"relative_reach": 0},
        "-reach-128": {"relative_reach": 128},
        "-unscaled": {"scaling": 1.0, "head_dim": 64, "v_head_dim": 64},
        "-float32": {"dtype": "float32"},
    }
    for name, settings in features.items():
        given = {"relative_reach": REACH, **encoder, **settings}
        yield case_of(f"relative-encoder{name}", 1, uneven, **given)
    far: dict[str, Any] = {"max_context_len": 1152, **encoder}
    yield case_of("relative-encoder-long", 1, extend((0, 300), (0, 70)), relative_reach=128, **far)


def _steps(page: int, table: dict[str, Any]) -> Iterator[Case]:
    chain: dict[str, Any] = {"spec_topk": 1, **table}
    drafts = verify(4, 9, page, 2 * page + 1)
    catching_up = extend((20, 3), (page, 1), (9, 4), mode=ForwardMode.DRAFT_EXTEND)
    mixed = extend((0, 21), (40, 1), (17, 8), (5, 1), mode=ForwardMode.MIXED)
    yield case_of("relative-mixed", page, mixed, **table)
    yield case_of("relative-decode-padding", page, decode(20, 3, padding=3), **table)
    yield case_of("relative-decode-lse-of-nothing", page, decode(0, 5), lse=True, **table)
    yield case_of("relative-extend-unsaved", page, extend((0, 30), (0, 7)),
                  save_kv_cache=False, **table)  # fmt: skip
    yield case_of("relative-extend-then-decode", page, extend((0, 30), (16, 11)), decode(31, 28),
                  **table)  # fmt: skip
    yield case_of("relative-verify-chain", page, drafts, **chain)
    yield case_of("relative-draft-extend", page, catching_up, **chain)
    # A decoder's self-attention has the table, its cross-attention has none
    yield case_of("relative-extend-cross", page,
                  extend((0, 5), (0, 21), (7, 3), encoder=(12, 0, 30)), **table)  # fmt: skip
    yield case_of("relative-decode-cross", page, decode(6, 1, 40, encoder=(12, 0, 30)), **table)
    pool: dict[str, Any] = {"window_pool": True, "windows": (8, None)}
    yield case_of("relative-decode-window-pool", page, decode(45, 3, 2 * page + 30), **pool,
                  **table)  # fmt: skip
