"""Cases of biases by distance: ALiBi's slopes and T5's tables. Imports no torch.

Under ALiBi, a query's own place adds the same to all of its logits, which the softmax takes out
again: only an LSE, or a sink, shows that it is right. Most tables of T5 reach less far than the
requests, so that distances beyond them are clipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attnmux.core import ForwardMode
from attnmux.testing.cases.case import Case, case_of, decode, extend, longest, verify

ALIBI: Mapping[str, Any] = {"alibi": True}
TABLE: Mapping[str, Any] = {"relative_reach": 12}
FAR: Mapping[str, Any] = {"relative_reach": 128}
UNSCALED: Mapping[str, Any] = {"scaling": 1.0, "head_dim": 64, "v_head_dim": 64}

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "-lse": {"lse": True},
    "-window": {"windows": (8, None)},
    "-sinks": {"sinks": True},
    "-8x8-heads": {"num_kv_heads": 8},
    "-14x2-heads": {"num_q_heads": 14},
    "-deterministic": {"kv_in_pool": True, "deterministic": True},
    "-float16": {"dtype": "float16"},
    "-float32-lse": {"dtype": "float32", "lse": True},
    "-fp8_e4m3": {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)},
    "-strided": {"strided_kv": True},
}
"""Features that go with either bias."""


def alibi_cases(page: int) -> Iterator[Case]:
    """Every kind of step of layers with slopes, and each feature that goes with them."""
    features: dict[str, Mapping[str, Any]] = {
        **FEATURES,
        "-chunk-lse": {"attention_chunk": 16, "lse": True},
        "-scale": {"scaling": 0.3},
        "-dim-64": {"head_dim": 64, "v_head_dim": 64},
    }
    yield from _cases("alibi", page, ALIBI, features, ALIBI)
    unsaved = extend((0, 30), (0, 7))
    yield case_of("alibi-extend-unsaved-lse", page, unsaved, save_kv_cache=False, lse=True, **ALIBI)
    chains = verify(4, 9, page, 2 * page + 1)
    yield case_of("alibi-verify-chain-lse", page, chains, lse=True, spec_topk=1, **ALIBI)


def relative_cases(page: int) -> Iterator[Case]:
    """Every kind of step of causal layers with a table, and each feature that goes with them."""
    features: dict[str, Mapping[str, Any]] = {
        **FEATURES,
        "-unscaled": UNSCALED,
        "-reach-0-lse": {"relative_reach": 0, "lse": True},
        "-reach-128": FAR,
        "-chunk": {"attention_chunk": 16},
    }
    yield from _cases("relative", page, TABLE, features, FAR)
    unsaved = extend((0, 30), (0, 7))
    yield case_of("relative-extend-unsaved", page, unsaved, save_kv_cache=False, **TABLE)
    # A decoder's self-attention has the table, its cross-attention has none
    encoder = (12, 0, 30)
    prompts = extend((0, 5), (0, 21), (7, 3), encoder=encoder)
    yield case_of("relative-extend-cross", page, prompts, **TABLE)
    yield case_of("relative-decode-cross", page, decode(6, 1, 40, encoder=encoder), **TABLE)


def relative_encoders(encoder: Mapping[str, Any]) -> Iterator[Case]:
    """Layers whose tables have both sides. encoder: the settings of every encoder's case."""
    uneven = extend((0, 41), (0, 1), (0, 20))
    features: dict[str, Mapping[str, Any]] = {
        "": {},
        "-reach-0": {"relative_reach": 0},
        "-reach-128": FAR,
        "-unscaled": UNSCALED,
        "-float32": {"dtype": "float32"},
    }
    for name, settings in features.items():
        given = {**TABLE, **encoder, **settings}
        yield case_of(f"relative-encoder{name}", 1, uneven, **given)
    far: dict[str, Any] = {"max_context_len": 1152, **encoder, **FAR}
    yield case_of("relative-encoder-long", 1, extend((0, 300), (0, 70)), **far)


def _cases(
    name: str,
    page: int,
    bias: Mapping[str, Any],
    features: Mapping[str, Mapping[str, Any]],
    far: Mapping[str, Any],
) -> Iterator[Case]:
    """bias: a layer's. far: the same, for long requests."""
    uneven, prefixes = decode(45, 3, 17, 70), extend((0, 41), (page + 3, 20), (2 * page, 1))
    for feature, settings in features.items():
        given = {**bias, **settings}
        yield case_of(f"{name}-decode{feature}", page, uneven, **given)
        yield case_of(f"{name}-extend{feature}", page, prefixes, **given)
    mixed = extend((0, 21), (40, 1), (17, 8), (5, 1), mode=ForwardMode.MIXED)
    yield case_of(f"{name}-mixed", page, mixed, **bias)
    yield case_of(f"{name}-decode-padding", page, decode(20, 3, padding=3), **bias)
    yield case_of(f"{name}-decode-lse-of-nothing", page, decode(0, 5), lse=True, **bias)
    both = extend((0, 30), (16, 11)), decode(31, 28)
    yield case_of(f"{name}-extend-then-decode", page, *both, **bias)
    chain: dict[str, Any] = {"spec_topk": 1, **bias}
    catching_up = extend((20, 3), (page, 1), (9, 4), mode=ForwardMode.DRAFT_EXTEND)
    yield case_of(f"{name}-verify-chain", page, verify(4, 9, page, 2 * page + 1), **chain)
    yield case_of(f"{name}-draft-extend", page, catching_up, **chain)
    pool: dict[str, Any] = {"window_pool": True, "windows": (8, None), **bias}
    yield case_of(f"{name}-decode-window-pool", page, decode(45, 3, 2 * page + 30), **pool)
    long: dict[str, Any] = {"lse": True, "max_context_len": max(longest(page), 1152), **far}
    yield case_of(f"{name}-decode-long-lse", page, decode(1100, 513, 512, 1), **long)
    yield case_of(f"{name}-extend-long-lse", page, extend((700, 130), (0, 260)), **long)
