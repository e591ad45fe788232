"""A sampled point: one value for each axis, which must go together and be affordable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

Point = dict[str, Any]

FLAGS = (
    *("sinks", "alibi", "relative_bias", "lse", "deterministic", "cross_attention"),
    *("multi_item", "strided_kv"),
)
MOST_IN_GRAPHS, MOST_ALONE = 96, 8
"""The most rows of a step in a graph, and of one whose requests also run alone."""
SLOWER_IN_GRAPHS = 16
"""An estimate of how much slower a step is while its graph is recorded without a device."""
MOST_READ, MOST_MULTIPLIED = 1 << 24, 1 << 28
"""The most elements of K that a kernel reads for one layer, and the most products of Q and K: about
one second of one CPU core."""


def _clear(*names: str) -> Point:
    return {name: NEUTRAL.get(name) for name in names}


NEUTRAL: Mapping[str, Any] = {
    "store": "call",
    **dict.fromkeys((*FLAGS, "graph", "shared", "host_lens"), False),
    **dict.fromkeys(("padding", "new", "spec_draft_tokens", "v_head_dim"), 0),
}
"""Values that request nothing. For axes that are not listed, it is None."""

ENCODER: Point = {
    **_clear("sliding_window", "attention_chunk", "logit_cap", "kv_scales", "store"),
    **_clear("sinks", "deterministic", "lse", "cross_attention", "multi_item", "v_head_dim"),
    **_clear("strided_kv", "alibi"),
    **{"num_kv_heads": 2, "group_size": 4, "page_size": 1},
}
"""An encoder's request mentions neither the cache nor heads."""

RULES: tuple[tuple[Callable[[Point], object], Point], ...] = (
    (lambda p: p["mode"] == "encoder", ENCODER),
    (lambda p: p["mode"] not in ("verify", "draft"), _clear("spec_topk")),
    (lambda p: p["mode"] == "draft" or (p["mode"], p["spec_topk"]) == ("verify", None),
     {"spec_topk": 1}),
    (lambda p: p["mode"] != "verify", _clear("spec_draft_tokens")),
    (lambda p: p["mode"] not in ("decode", "verify"), _clear("graph", "padding")),
    (lambda p: p["rows"] > MOST_IN_GRAPHS, _clear("graph")),
    (lambda p: p["mode"] in ("decode", "verify"), _clear("new")),
    (lambda p: p["mode"] in ("decode", "verify", "encoder"), _clear("shared")),
    (lambda p: p["mode"] not in ("extend", "decode"), _clear("cross_attention", "deterministic")),
    (lambda p: p["mode"] != "extend" or p.get("cross_attention"), _clear("multi_item")),
    (lambda p: p.get("cross_attention") or p.get("multi_item"),
     _clear("sliding_window", "attention_chunk", "shared", "deterministic", "graph", "padding",
            "store")),
    (lambda p: p.get("alibi"), _clear("logit_cap", "cross_attention", "multi_item")),
    (lambda p: p.get("alibi") or (p["spec_topk"] or 1) > 1, _clear("relative_bias")),
    (lambda p: p.get("relative_bias"), _clear("logit_cap", "multi_item")),
    (lambda p: (p["spec_topk"] or 1) > 1, _clear("alibi")),
    (lambda p: p["rows"] > MOST_ALONE, _clear("deterministic")),
    (lambda p: p["deterministic"], {**_clear("graph", "padding"), "store": "pool"}),
    (lambda p: p.get("sliding_window"), _clear("attention_chunk")),
    (lambda p: not p["kv_dtype"].startswith("fp") or p["kind"] != "mha", _clear("kv_scales")),
)  # fmt: skip
"""Replacements for values that have no meaning at a point or that the suite cannot combine. Each
rule is a condition with the values that replace the point's. The rules for modes come first."""


def settle(point: Point) -> None:
    """Apply the rules. A point that loses a pinned value is drawn again."""
    for holds, values in RULES:
        if holds(point):
            point.update((name, value) for name, value in values.items() if name in point)
    if point["mode"] == "encoder":
        point["kv_dtype"] = point["dtype"]


def cost(point: Point) -> float:
    """The larger of the elements read and the products, each in units of its limit."""
    latent = point["kind"] in ("mla", "nsa")
    dim = point["kv_lora_rank"] if latent else point["head_dim"]
    heads = point["num_q_heads"] if latent else point["num_kv_heads"] * point["group_size"]
    keys = point["rows"] * point["length"]
    read = keys * dim * (1 if latent else point["num_kv_heads"])
    new = max(point["new"], point["spec_draft_tokens"], 1)
    if point["mode"] in ("extend", "mixed", "draft", "encoder"):
        new = min(new, point["length"])
    slower = SLOWER_IN_GRAPHS if point["graph"] else 1
    return float(slower * max(read / MOST_READ, keys * new * heads * dim / MOST_MULTIPLIED))


def afford(
    point: Point, pins: Point, levels: Mapping[str, tuple[Any, ...]], rng: Random, most: float
) -> None:
    """Choose smaller values for axes that are not pinned, until the point is affordable."""
    names = ["rows", "length", "new", "group_size", "num_kv_heads", "num_q_heads", "head_dim"]
    rng.shuffle(names)
    for name in names:
        if cost(point) <= most:
            return
        if name in pins or name not in levels or not point[name]:
            continue
        smaller = sorted(
            (v for v in levels[name] if v is not None and v < point[name]), reverse=True
        )
        for value in smaller:
            point[name] = value
            if cost(point) <= most:
                return
