"""The table of `eight_bit_products.py`: shapes, steps, tiles, limits and rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from attnmux.testing import Case, extend
from attnmux.triton.launches.configs import TileConfig
from attnmux.triton.launches.hopper_configs import (
    HOPPER_HELD_TILES,
    HOPPER_HIGH_HELD_TILES,
    HOPPER_HIGH_TILES,
    HOPPER_TILES,
)

EXACT, QUERIES, ALL, FA3, ALONE = "16 bits", "queries", "all", "fa3", "fa3 alone"
SIDES = (EXACT, QUERIES, ALL, FA3, ALONE)
CHECKED = (EXACT, QUERIES, ALL, FA3)
"""The sides whose errors are columns."""
OPTIONS = {EXACT: "none", QUERIES: "queries", ALL: "all"}
TILES: Mapping[str, TileConfig] = {
    "192x64x3": replace(HOPPER_HIGH_TILES, num_stages=3),
    "192x64 held": HOPPER_HIGH_HELD_TILES,
    "128x128": HOPPER_TILES,
    "128x128x3": replace(HOPPER_TILES, num_stages=3),
    "128x128 held": HOPPER_HELD_TILES,
    "192x128": replace(HOPPER_HIGH_TILES, block_n=128),
    "192x128 held": replace(HOPPER_HIGH_HELD_TILES, block_n=128),
}
"""By rows, keys of a block and, if more than 2, blocks ahead; held: queries in registers."""
VARIANTS = {f"{side} {name}": (side, name) for side in (QUERIES, ALL) for name in TILES}
EXACT_LIMIT = 1e-2
"""The relative error of 16-bit products: results and weights are rounded to bfloat16."""
ROUNDED_LIMIT = EXACT_LIMIT + 2**-4
"""With half a unit of e4m3. Rounded queries alone are expected to reach 0.027, and 0.037 with the
rounded weights of FlashAttention 3."""
COLUMNS = {
    "step": "",
    "heads": "",
    **dict.fromkeys((f"{side}, us" for side in SIDES), ".1f"),
    **dict.fromkeys((f"{side} : fa3" for side in OPTIONS), ".3f"),
    **dict.fromkeys((f"{side}, error" for side in CHECKED), ".4f"),
    "verdict": "",
}

Sizes = tuple[int, int, int]
STEPS: tuple[Sizes, ...] = (
    *((2, 1024, 6000), (4, 512, 8192), (1, 4096, 0), (8, 1024, 1024), (1, 512, 32_768)),
)
"""Requests, new tokens of each, cached tokens."""
HEADS: tuple[Sizes, ...] = ((32, 8, 128), (32, 8, 64))
"""Query heads, KV heads and their columns."""
RAGGED = extend((500, 700), (1200, 1), (0, 300))


def shape(name: str, heads: int, kv_heads: int, dim: int, page: int = 16, **more: Any) -> Case:  # noqa: ANN401  # fields of Case by name
    return Case(
        name=name,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        v_head_dim=dim,
        page_size=page,
        kv_dtype="fp8_e4m3",
        max_context_len=8192,
        host_lens=True,
        **{"windows": (None,), "steps": (RAGGED,), **more},
    )


SHAPES = (
    *(
        shape(f"group {group}, page {page}", 2 * group, 2, dim, page)
        for group, dim, page in (
            *((1, 128, 16), (4, 128, 1), (4, 128, 64), (8, 128, 16)),
            *((1, 64, 1), (4, 64, 16), (8, 64, 64), (1, 256, 64), (4, 256, 16), (8, 256, 1)),
        )
    ),
    shape("keys in splits", 32, 8, 128, steps=(extend((8000, 64)),)),
    shape("LSE and scales", 32, 8, 128, lse=True, kv_scales=(0.5, 2.0)),
    shape("sinks", 32, 8, 64, sinks=True),
    shape("cap", 32, 8, 128, logit_cap=30.0),
    shape("cap", 8, 2, 256, logit_cap=30.0),
    shape("float16", 32, 8, 128, dtype="float16"),
    shape("window", 32, 8, 128, windows=(200,)),
    shape("other width", 32, 8, 96),
)
WITHOUT_PRODUCTS = ("window", "other width")
"""Shapes that the 8-bit products do not serve: the option changes nothing."""
TINY_SHAPES = (
    shape("tiny", 4, 2, 64, steps=(extend((30, 300), (0, 9)),)),
    shape("tiny window", 4, 2, 64, steps=(extend((30, 20)),), windows=(7,)),
)
TINY_STEPS: tuple[Sizes, ...] = ((1, 260, 40),)
TINY_HEADS: tuple[Sizes, ...] = ((2, 1, 64),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A side's result; without an error, `failure` says why."""

    error: float | None = None
    """Norm of the difference from float64 by that of the expected answer."""
    us: float | None = None
    failure: str = ""


Figures = Mapping[str, Figure]


def faults(figures: Figures, *, has_products: bool) -> str:
    """The sides that are wrong; of 8 bits also one that rounded nothing."""
    wrong = []
    for side, figure in figures.items():
        error, is_fa3 = figure.error, side in (FA3, ALONE)
        is_rounded = is_fa3 or (side != EXACT and has_products)
        if error is None:
            wrong += [] if is_fa3 else [f"{side} failed"]
        elif not error <= (ROUNDED_LIMIT if is_rounded else EXACT_LIMIT):
            wrong.append(f"{side} WRONG by {error:.2g}")
        elif is_rounded and not is_fa3 and error < 3 * (figures[EXACT].error or 0):
            wrong.append(f"{side} NOT ROUNDED")
    return ", ".join(wrong) or "right"


def cells(step: str, heads: str, figures: Figures, verdict: str) -> Iterator[str | float | None]:
    """The cells of a row, in the order of COLUMNS."""
    us = {side: figure.us for side, figure in figures.items()}
    yield from (step, heads, *(us.get(side) for side in SIDES))
    yield from (ratio(us.get(side), us.get(FA3)) for side in OPTIONS)
    yield from (figures[side].error if side in figures else None for side in CHECKED)
    yield verdict


def ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


def notes(step: str, figures: Figures) -> Iterator[str]:
    """Failures, and the figures of variants."""
    for side, figure in figures.items():
        if figure.failure:
            yield f"- {step}, {side}: {figure.failure}"
        elif side in VARIANTS and figure.us is not None:
            by = ratio(figure.us, figures[FA3].us)
            of_fa3 = "" if by is None else f", {by:.3f} of fa3's"
            yield f"- {step}, {side}: {figure.us:.1f} us{of_fa3}, error {figure.error:.4f}"
