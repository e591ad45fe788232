"""The table of `triton_gpu.py`: each family's workloads, libraries and bars, and its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean
from typing import Any

import torch
from benchmarks import libraries, library_flashinfer
from benchmarks.cases import Case, decode, extend

from attnmux.testing.bench import Step, Workload
from attnmux.testing.bench.timing import Run

OURS, OUR_BF16 = "ours", "our bf16"
FAMILIES = ("decode", "fp8", "fp4", "mla", "extend", "extend fp8", "turns", "turns fp8")
NARROW = ("fp8", "fp4")
"""Words of the families that are compared with our own bfloat16."""
SIDES = (OURS, OUR_BF16, "flashinfer", "flashinfer fa2", "fa3", "flashmla")
COLUMNS = {
    **{"family": "", "workload": "", "layers": "d"},
    **dict.fromkeys(SIDES, ".1f"),
    **{"best": "", "ratio": ".3f", "TB/s": ".2f", "TFLOP/s": ".0f", "error": ".0e"},
}


BARS: Mapping[str, tuple[float | None, float]] = {
    "decode": (0.96, 1.01),
    "fp8": (None, 1 / 1.8),
    "fp4": (None, 1 / 2.8),
    "mla": (None, 1.10),
    "extend": (None, 1.20),
    "extend fp8": (None, 1.0),
    "turns": (None, 1.10),
    "turns fp8": (None, 1.0),
}
"""The largest geometric mean and the largest single ratio that a family may have."""

Calls = Mapping[str, Callable[[Any, Step], list[Run]]]
PEERS: Mapping[str, tuple[str, Calls]] = {
    "flashinfer": (
        "flashinfer",
        {
            **dict.fromkeys(("decode", "fp8", "extend", "turns"), library_flashinfer.flashinfer),
            "mla": library_flashinfer.flashinfer_mla,
        },
    ),
    "flashinfer fa2": (
        "flashinfer",
        {"extend": partial(library_flashinfer.flashinfer, backend="fa2")},
    ),
    "fa3": (
        "sgl_kernel.flash_attn",
        {**dict.fromkeys(("decode", "extend", "turns"), libraries.fa3), "mla": libraries.fa3_mla},
    ),
    "flashmla": (
        "sgl_kernel.flash_mla",
        {"mla": lambda library, step: libraries.flashmla(library, step)[1]},
    ),
}
"""Kernels of libraries: the module, and the calls for each family that they serve."""


def uneven(batch_size: int, ctx: int) -> Workload:
    """Decode with lengths between 0.05 and 1.95 times `ctx`, the same ones in every run."""
    drawn = torch.Generator().manual_seed(1)
    factors = 0.05 + 1.9 * torch.rand(batch_size, generator=drawn)
    return Workload.uneven(max(1, int(ctx * factor)) for factor in factors.tolist())


TURNS = ((1, 64, 131_072), (1, 512, 32_768), (8, 32, 16_384), (4, 16, 8192), (1, 64, 2048))
"""Steps of few new tokens behind long prefixes: requests, new tokens of each, cached tokens."""

CASES: Mapping[str, Sequence[Case]] = {
    "decode": (
        *(
            decode(batch_size, ctx, page_size=page)
            for batch_size, ctx, page in (
                *((1, 4096, 16), (1, 65536, 16), (16, 4096, 1), (16, 4096, 16)),
                *((64, 4096, 1), (64, 4096, 64), (128, 2048, 16), (64, 16384, 16)),
            )
        ),
        Case(workload=uneven(64, 8192)),
        decode(64, 4096, q_heads=64),
        decode(64, 2048, kv_heads=32),
    ),
    "fp8": tuple(decode(64, ctx, kv_dtype="fp8_e4m3") for ctx in (4096, 16384)),
    "fp4": tuple(decode(64, ctx, kv_dtype="fp4_e2m1") for ctx in (4096, 16384)),
    "mla": tuple(
        decode(batch_size, ctx, kind="mla", q_heads=heads, page_size=64, is_apart=True)
        for batch_size, ctx, heads in (
            *((1, 8192, 16), (64, 4096, 16), (64, 4096, 128), (128, 8192, 16)),
        )
    ),
    "extend": (
        extend(1, 8192),
        extend(8, 2048, page_size=1),
        extend(4, 512, 8192),
        extend(1, 32768, page_size=64),
    ),
    "extend fp8": (
        extend(1, 8192, kv_dtype="fp8_e4m3"),
        extend(8, 2048, page_size=1, kv_dtype="fp8_e4m3"),
        extend(4, 512, 8192, kv_dtype="fp8_e4m3"),
        extend(1, 8192, 57_344, kv_dtype="fp8_e4m3"),
    ),
    "turns": tuple(extend(*turn) for turn in TURNS),
    "turns fp8": tuple(extend(*turn, kv_dtype="fp8_e4m3") for turn in TURNS[:3]),
}
_TINY: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "dtype": "float16"}
TINY: Mapping[str, Sequence[Case]] = {
    # In float16: Triton's interpreter does not multiply bfloat16
    "decode": (Case(workload=uneven(2, 40), **_TINY),),
    "fp8": (decode(2, 40, **_TINY, kv_dtype="fp8_e5m2"),),
    "fp4": (decode(2, 40, **_TINY, kv_dtype="fp4_e2m1"),),
    "mla": (decode(2, 40, kind="mla", q_heads=16, page_size=64, dtype="float16", is_apart=True),),
    "extend": (extend(2, 24, 16, **_TINY),),
    "extend fp8": (extend(2, 24, 16, **_TINY, kv_dtype="fp8_e5m2"),),
    "turns": (extend(1, 3, 1100, **_TINY),),
    "turns fp8": (extend(1, 3, 1100, **_TINY, kv_dtype="fp8_e5m2"),),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A side's result on a workload: a time, or why there is none."""

    us: float | None = None
    """Of one layer."""
    error: float | None = None
    """The larger of those against float64 on sampled queries and against our whole output."""
    failure: str = ""

    @property
    def cell(self) -> str:
        if self.us is not None:
            return f"{self.us:.1f}"
        return "WRONG" if self.error is not None else "failed" if self.failure else "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A workload's figures, by side."""

    family: str
    workload: str
    layers: int
    ready_s: float
    """Until ours had answered: its kernels compiled or found on disk, its answer checked."""
    figures: dict[str, Figure]
    kv_bytes: int
    flops: int

    @property
    def is_narrow(self) -> bool:
        """Whether K and V have fewer than 16 bits."""
        return any(word in self.family for word in NARROW)

    @property
    def best(self) -> tuple[str, float] | None:
        """The side that ours is compared with; with fewer bits, our own bfloat16."""
        timed = {name: figure.us for name, figure in self.figures.items() if name != OURS}
        if self.is_narrow:
            timed = {name: us for name, us in timed.items() if name == OUR_BF16}
        known = [(us, name) for name, us in timed.items() if us is not None]
        return None if not known else (min(known)[1], min(known)[0])

    @property
    def ratio(self) -> float | None:
        us, best = self.figures[OURS].us, self.best
        return None if us is None or best is None else us / best[1]

    def cells(self) -> Iterator[str | float | None]:
        """As COLUMNS names them."""
        us, best = self.figures[OURS].us, self.best
        errors = [each.error for each in self.figures.values() if each.error is not None]
        yield from (self.family, self.workload, self.layers)
        yield from (self.figures.get(side, Figure()).cell for side in SIDES)
        yield None if best is None else best[0]
        yield self.ratio
        yield None if us is None else self.kv_bytes / us / 1e6
        yield None if us is None else self.flops / us / 1e6
        yield max(errors) if errors else None


def notes(rows: Sequence[Row], *, has_bars: bool) -> Iterator[str]:
    """Sides without a time, and each family's ratios and bars."""
    for row in rows:
        for name, figure in row.figures.items():
            if figure.us is None:
                wrong = "" if figure.error is None else f"WRONG: off by {figure.error:.1e}"
                yield f"- {row.workload}, {name}: {figure.failure or wrong}"
    for family in dict.fromkeys(row.family for row in rows):
        yield summary(family, [row for row in rows if row.family == family], has_bars=has_bars)
    yield f"ours ready after {max(row.ready_s for row in rows):.1f} s at most"


def summary(family: str, rows: Sequence[Row], *, has_bars: bool) -> str:
    """The ratios of a family in one line, and whether its bars are kept."""
    ratios = [(row.ratio, row.workload) for row in rows if row.ratio is not None]
    if not ratios:
        return f"{family}: nothing to compare with"
    mean = geometric_mean(ratio for ratio, _ in ratios)
    worst, where = max(ratios)
    (most_mean, most), of = BARS[family], f"{len(ratios)} of {len(rows)} workloads"
    kept = worst <= most and (most_mean is None or mean <= most_mean)
    kept = kept and len(ratios) == len(rows)
    bars = f"{'' if most_mean is None else f'mean {most_mean:.2f}, '}worst {most:.3f}"
    faster = f"; {1 / mean:.2f} times as fast" if family in NARROW else ""
    verdict = ("kept" if kept else "MISSED") if has_bars else "none in a dry run"
    said = f"geometric mean {mean:.3f}, worst {worst:.3f} ({where}){faster}; {of}"
    return f"{family}: {said}; bars: {bars}: {verdict}"
