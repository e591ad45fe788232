"""What `triton_gpu.py` prints: a workload's figures, and a family's beside its bars."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from benchmarks.triton_sides import Figure

OURS, OUR_BF16 = "ours", "our bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Of the ratios of a family: their geometric mean and each of them, at most."""

    mean: float | None = None
    worst: float


BARS = {
    "decode": Bar(mean=0.96, worst=1.01),
    "fp8": Bar(worst=1 / 1.8),
    "mla": Bar(worst=1.10),
    "extend": Bar(worst=1.20),
}


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
    def best(self) -> tuple[str, float] | None:
        """Whom ours is compared with; in FP8 our own bfloat16."""
        timed = {name: figure.us for name, figure in self.figures.items() if name != OURS}
        if self.family == "fp8":
            timed = {name: us for name, us in timed.items() if name == OUR_BF16}
        known = [(us, name) for name, us in timed.items() if us is not None]
        return None if not known else (min(known)[1], min(known)[0])

    @property
    def ratio(self) -> float | None:
        us, best = self.figures[OURS].us, self.best
        return None if us is None or best is None else us / best[1]


def line(row: Row, sides: list[str]) -> str:
    """A row of the family's table."""
    us, best, ratio = row.figures[OURS].us, row.best, row.ratio
    errors = [figure.error for figure in row.figures.values() if figure.error is not None]
    cells = [row.workload, str(row.layers), *(row.figures[name].cell for name in sides)]
    cells.append("-" if best is None else best[0])
    cells.append("-" if ratio is None else f"{ratio:.3f}")
    cells.append("-" if us is None else f"{row.kv_bytes / us / 1e6:.2f}")
    cells.append("-" if us is None else f"{row.flops / us / 1e6:.0f}")
    cells.append(f"{max(errors):.0e}" if errors else "-")
    return f"| {' | '.join(cells)} |"


def summary(family: str, rows: list[Row], *, has_bars: bool) -> str:
    """The ratios of a family in one line, and whether its bars are kept."""
    ratios = [(row.ratio, row.workload) for row in rows if row.ratio is not None]
    if not ratios:
        return f"{family}: nothing to compare with"
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio, _ in ratios))
    worst, where = max(ratios)
    bar, of = BARS[family], f"{len(ratios)} of {len(rows)} workloads"
    kept = worst <= bar.worst and (bar.mean is None or mean <= bar.mean)
    kept = kept and len(ratios) == len(rows)
    bars = f"{'' if bar.mean is None else f'mean {bar.mean:.2f}, '}worst {bar.worst:.3f}"
    faster = f"; {1 / mean:.2f} times as fast" if family == "fp8" else ""
    verdict = ("kept" if kept else "MISSED") if has_bars else "none in a dry run"
    said = f"geometric mean {mean:.3f}, worst {worst:.3f} ({where}){faster}; {of}"
    return f"{family}: {said}; bars: {bars}: {verdict}"
