"""A sampled point: one value for each axis, which must go together and be affordable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from attnmux.core.verbs import AXES
from attnmux.testing.cases.engines import FAR_PAGE, FAR_SLOT

Point = dict[str, Any]

FLAGS = tuple(axis.name for axis in AXES if axis.values == "flag" and axis.samples)
OPTION = "option "
"""Axes of a card's options begin with it."""
Value = str | int | float | bool | frozenset[str]
"""A value of an axis."""

FIRST_PAGES: Mapping[str, Callable[[int], int]] = {
    "pages": lambda page: FAR_PAGE,
    "slots": lambda page: FAR_SLOT // page + 1,
}
"""The first page of requests, by the size of pages: from there on numbers of pages exceed 16 bits,
or those of slots 20."""
MOST_BYTES = 1 << 30
"""Most bytes of the pool of one layer that has such pages."""
MOST_SHARED = 3
"""Pages of a prefix that requests share."""
LONG_ROW = 4096
"""Requests that are longer have one step, and the first rows of the request table."""
MOST_IN_GRAPHS, MOST_ALONE = 320, 8
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
    **dict.fromkeys((*FLAGS, "graph", "shared", "host_lens", "empty"), False),
    **dict.fromkeys(("padding", "new", "spec_draft_tokens", "v_head_dim"), 0),
    "first_row": 1,
}
"""Values that request nothing. For axes that are not listed, it is None."""

ENCODER: Point = {
    **_clear("sliding_window", "attention_chunk", "logit_cap", "kv_scales", "store"),
    **_clear("sinks", "deterministic", "lse", "cross_attention", "multi_item", "v_head_dim"),
    **_clear("strided_kv", "alibi", "then", "empty", "shared", "place"),
    **{"num_kv_heads": 2, "group_size": 4, "page_size": 1},
}
"""An encoder's request mentions neither the cache nor heads."""


def first_page(point: Point) -> int:
    """The first page of the requests."""
    place = point["place"]
    return FIRST_PAGES[place](point["page_size"]) if place else 1


def _bytes_before(point: Point) -> int:
    """Bytes of a layer's pages before the first one of the requests."""
    if point["kind"] in ("mla", "nsa"):
        width = point["kv_lora_rank"] + point["qk_rope_head_dim"]
    else:
        dims = point["head_dim"] + (point["v_head_dim"] or point["head_dim"])
        width = point["num_kv_heads"] * dims
    size = {"float32": 4, "bfloat16": 2, "float16": 2}.get(point["kv_dtype"], 1)
    return int(first_page(point) * point["page_size"] * width * size)


def _has(point: Point, *modes: str) -> bool:
    """Whether a step of the case has one of the modes."""
    return point["mode"] in modes or point["then"] in modes


RULES: tuple[tuple[Callable[[Point], object], Point], ...] = (
    (lambda p: p["mode"] == "encoder", ENCODER),
    (lambda p: p["length"] > LONG_ROW, _clear("first_row", "then", "empty")),
    (lambda p: p.get("cross_attention") or p.get("multi_item") or p["deterministic"],
     _clear("then", "empty")),
    (lambda p: not _has(p, "verify", "draft"), _clear("spec_topk")),
    (lambda p: _has(p, "draft") or (_has(p, "verify") and not p["spec_topk"]), {"spec_topk": 1}),
    (lambda p: not _has(p, "verify"), _clear("spec_draft_tokens")),
    (lambda p: p["mode"] not in ("decode", "verify"), _clear("graph", "padding")),
    (lambda p: p["rows"] > MOST_IN_GRAPHS, _clear("graph")),
    (lambda p: p["mode"] in ("decode", "verify"), _clear("new")),
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
    (lambda p: _bytes_before(p) > MOST_BYTES, _clear("place")),
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
    length = max(point["length"], MOST_SHARED * point["page_size"] * point["shared"])
    keys = point["rows"] * length
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
