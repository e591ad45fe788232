"""The figures of `attnmux bench` as one HTML page: time and error against length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go
from plotly.colors import qualitative
from plotly.subplots import make_subplots

from attnmux.bench.cli.bench_run import Result
from attnmux.bench.measuring import Row

HEIGHT = 420
"""Pixels of one row of plots."""

Curve = tuple[str, int, int]
"""Phase, batch size and new tokens: the steps of one curve differ in their length alone."""


def write_page(result: Result, path: Path) -> None:
    """Write a page that needs no network. Raises OSError where it cannot be written."""
    figure(result.rows, str(result.place), result.request.dtype or "").write_html(
        path, include_plotlyjs=True
    )


def figure(rows: Sequence[Row], place: str, dtype: str) -> go.Figure:
    """A row of plots for each batch size of each phase: time on the left, error on the right.

    Lines join a backend's points; each backend has one colour. Backends with a wrong answer have
    an error and no time.
    """
    curves = list(dict.fromkeys(_curve(row) for row in rows))
    titles = [
        f"{phase}, requests x new tokens {batch} x {new}: {what}"
        for phase, batch, new in curves
        for what in ("time", "error")
    ]
    made = make_subplots(rows=len(curves), cols=2, subplot_titles=titles)
    backends = list(dict.fromkeys(row.backend for row in rows))
    shown: set[str] = set()
    for place_of_curve, curve in enumerate(curves, 1):
        for number, backend in enumerate(backends):
            own = sorted(
                (row for row in rows if row.backend == backend and _curve(row) == curve),
                key=lambda row: row.workload.keys,
            )
            colour = qualitative.Dark24[number % len(qualitative.Dark24)]
            for column, name in enumerate(("median_us", "rms_error"), 1):
                points = [row for row in own if getattr(row, name) is not None]
                if not points:
                    continue
                made.add_scatter(
                    x=[row.workload.keys for row in points],
                    y=[getattr(row, name) for row in points],
                    name=backend,
                    legendgroup=backend,
                    showlegend=backend not in shown,
                    mode="lines+markers",
                    line={"color": colour},
                    text=[f"{row.workload}, {row.execution}" for row in points],
                    row=place_of_curve,
                    col=column,
                )
                shown.add(backend)
    made.update_xaxes(type="log", title_text="keys of a request")
    made.update_yaxes(type="log", title_text="us of one layer's call", col=1)
    made.update_yaxes(type="log", title_text=f"rms error, roundings of {dtype}", col=2)
    made.update_layout(
        title_text=f"Attention backends on {place}", height=100 + HEIGHT * len(curves)
    )
    return made


def _curve(row: Row) -> Curve:
    return row.workload.phase, row.workload.batch_size, row.workload.new
