"""The result of `attnmux bench` as one HTML page, which needs no other file and no network."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
import torch
from plotly.colors import qualitative
from plotly.offline import get_plotlyjs

from attnmux.testing.bench.cli.bench_run import Result
from attnmux.testing.bench.cli.tables import shapes
from attnmux.testing.bench.measuring import Row
from attnmux.testing.bench.report import facts
from attnmux.testing.bench.roofline import Ceilings, Cost

TEMPLATE = "page.html"
SYMBOLS = "circle", "square", "diamond", "triangle-up", "triangle-down", "pentagon", "star"
"""Markers of the backends, besides their colours; hollow for extend in the roofline."""
SINGLE = "steps of a single length"
GREY = "#888"
HEIGHT = {"roofline": 480, "curve": 320}
"""Pixels of a plot. Its width is the page's."""

Style = Mapping[str, tuple[str, str]]
"""Colour and marker by backend."""


def write_page(result: Result, path: Path) -> None:
    """Write the page. Raises OSError where it cannot be written."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        files("attnmux.testing.bench.cli").joinpath(TEMPLATE).read_text(encoding="utf-8")
    )
    style = styles(result.rows)
    unfinished: dict[tuple[str, str], list[str]] = {}
    for row in result.rows:
        if row.status != "measured":
            key = row.backend, f"{row.status}: {row.why}"
            unfinished.setdefault(key, []).append(str(row.workload))
    text = template.render(
        result=result,
        date=datetime.now(timezone.utc).date().isoformat(),
        command=shlex.join(["attnmux", *sys.argv[1:]]),
        facts=facts_of(result),
        shapes=shapes(result.request),
        plotly=get_plotlyjs(),
        style=style,
        glyphs=dict(zip(SYMBOLS, "●■◆▲▼⬟★", strict=True)),
        roofline=_html(roofline(result.rows, result.ceilings, style)),
        sections=[
            (
                title,
                [
                    _html(times(rows, style, joined=title != SINGLE)),
                    _html(errors(rows, style, joined=title != SINGLE)),
                ],
            )
            for title, rows in curves(result.rows).items()
        ],
        unfinished=unfinished,
        gbs=_gbs,
    )
    path.write_text(text, encoding="utf-8")


def facts_of(result: Result) -> dict[str, Any]:
    """`facts` with the plugin and the libraries of each backend that was tried."""
    tried = {row.backend for row in result.rows}
    offers = [offer for offer in result.place.offers if tried & {*offer.names}]
    names = dict.fromkeys(name for offer in offers for name in offer.versions())
    return facts(torch.device(result.place.device), *(name for name in names if name != "torch"))


def styles(rows: Iterable[Row]) -> Style:
    """A colour and a marker for each backend, the same in all plots."""
    colours = qualitative.D3
    return {
        backend: (colours[number % len(colours)], SYMBOLS[number % len(SYMBOLS)])
        for number, backend in enumerate(dict.fromkeys(row.backend for row in rows))
    }


def curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of steps that differ in their length alone, by title and from short to long.

    An extend step without a prefix has its new tokens as its length. Steps that are alone in their
    length are together under `SINGLE`.
    """
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row.workload.phase, row.workload.keys)):
        work = row.workload
        requests = f"{work.batch_size} request{'s' if work.batch_size > 1 else ''}"
        title = f"decode, {requests}"
        if work.phase != "decode":
            new = f"{work.new} new tokens each" if work.prefix else "no prefix"
            title = f"{work.phase}, {requests}, {new}"
        if work.decoding:
            title += f", beside {work.decoding} decoding"
        found.setdefault(title, []).append(row)
    alone = [title for title in found if len({row.workload for row in found[title]}) == 1]
    if alone:
        found[SINGLE] = [row for title in alone for row in found.pop(title)]
    return found


def roofline(rows: Sequence[Row], reached: Ceilings, style: Style) -> go.Figure:
    """Each measured step at its intensity and rate, under the ceilings of the device."""
    measured = [row for row in rows if row.cost is not None and row.median_us]
    figure = _figure(HEIGHT["roofline"])
    places = [row.cost.intensity for row in measured if row.cost is not None]
    left, right = min([*places, reached.ridge]) / 3, max([*places, reached.ridge]) * 4
    corners = [left, reached.ridge, right]
    roof = [min(x * reached.read_gbs * 1e9, reached.matmul_tflops * 1e12) for x in corners]
    figure.add_scatter(
        x=corners, y=roof, mode="lines", line={"color": GREY, "width": 2}, hoverinfo="skip"
    )
    bandwidth, products = str(reached).split(", ")
    middle = math.sqrt(left * reached.ridge)
    for x, y, text, shift in (
        (middle, middle * reached.read_gbs * 1e9, bandwidth, -8),
        (right, reached.matmul_tflops * 1e12, products, 0),
    ):
        figure.add_annotation(
            x=math.log10(x),
            y=math.log10(y),
            text=text,
            showarrow=False,
            xanchor="right",
            yanchor="bottom",
            xshift=shift,
            font={"color": GREY},
        )
    for backend, (colour, symbol) in style.items():
        for phase, shape in (("decode", symbol), ("extend", f"{symbol}-open")):
            own = [row for row in measured if (row.backend, row.workload.phase) == (backend, phase)]
            if own:
                figure.add_scatter(
                    x=[row.cost.intensity for row in own if row.cost is not None],
                    y=[_rate(row) for row in own],
                    name=backend,
                    mode="markers",
                    marker={
                        "color": colour,
                        "symbol": shape,
                        "size": 8,
                        "line": {"width": 1.5, "color": colour},
                    },
                    text=[_said(row) for row in own],
                    hovertemplate="%{text}<extra></extra>",
                )
    rates = [_rate(row) for row in measured]
    figure.update_xaxes(_axis("FLOP per byte of one layer's call", corners))
    figure.update_yaxes(_axis("FLOP/s", [*roof, *rates]))
    return figure


def times(rows: Sequence[Row], style: Style, *, joined: bool = True) -> go.Figure:
    """Microseconds against length, with the range of the rounds. joined: as in `_curve`."""
    return _curve(rows, style, "us of one layer's call", ("median_us",), joined)


def errors(rows: Sequence[Row], style: Style, *, joined: bool = True) -> go.Figure:
    """Error against length: rms solid, the worst query and head dotted or hollow."""
    return _curve(rows, style, "error in roundings", ("rms_error", "worst_error"), joined)


def _curve(
    rows: Sequence[Row], style: Style, title: str, names: Sequence[str], joined: bool
) -> go.Figure:
    """joined: draw lines over a length in tokens; otherwise points over the names of the steps."""
    figure = _figure(HEIGHT["curve"])
    values: list[float] = []
    for backend, (colour, symbol) in style.items():
        for name, dash in zip(names, ("solid", "dot"), strict=False):
            own = [row for row in rows if row.backend == backend and _positive(getattr(row, name))]
            if not own:
                continue
            figure.add_scatter(
                x=[row.workload.keys if joined else str(row.workload) for row in own],
                y=[getattr(row, name) for row in own],
                name=backend,
                meta=name,
                mode="lines+markers" if joined else "markers",
                line={"color": colour, "dash": dash},
                marker={
                    "color": colour,
                    "symbol": symbol if dash == "solid" else f"{symbol}-open",
                    "size": 8,
                },
                error_y=_noise(own) if name == "median_us" else None,
                text=[_said(row) for row in own],
                hovertemplate="%{text}<extra></extra>",
            )
            values += [getattr(row, name) for row in own]
            if name == "median_us":
                values += [us for row in own for us in row.rounds_us]
    if joined:
        lengths = sorted({row.workload.keys for row in rows})
        axis = _axis("keys of a request", lengths)
        texts = [f"{length:,}" for length in lengths]
        figure.update_xaxes({**axis, "tickvals": lengths, "ticktext": texts})
    else:
        steps = list(dict.fromkeys(str(row.workload) for row in rows))
        lines = [step.replace(":", "<br>").replace(",", "<br>") for step in steps]
        figure.update_xaxes(type="category", tickvals=steps, ticktext=lines, tickangle=0)
    figure.update_yaxes(_axis(title, values))
    return figure


def _noise(rows: Sequence[Row]) -> dict[str, object]:
    """Bars from the fastest round to the slowest."""
    middle = [row.median_us or 0.0 for row in rows]
    return {
        "symmetric": False,
        "array": [max(row.rounds_us) - us for row, us in zip(rows, middle, strict=True)],
        "arrayminus": [us - min(row.rounds_us) for row, us in zip(rows, middle, strict=True)],
        "thickness": 1,
    }


def _said(row: Row) -> str:
    """Everything about a point, in lines."""
    lines = [f"<b>{row.backend}</b>", f"{row.workload}, page {row.page_size}, {row.execution}"]
    if row.cost is not None and row.median_us is not None:
        lines.append(f"{row.median_us:,.1f} us, {row.share or 0:.1%} of the roof")
        lines.append(f"{_short(_rate(row))}FLOP/s, {_gbs(row.cost, row.median_us):.3g} GB/s")
    if row.rms_error is not None:
        lines.append(f"error: rms {row.rms_error:.2g}, worst {row.worst_error:.2g}")
    return "<br>".join(lines if not row.why else [*lines, row.status])


def _rate(row: Row) -> float:
    """FLOP/s."""
    assert row.cost is not None
    assert row.median_us is not None
    return row.cost.flops / row.median_us * 1e6


def _gbs(cost: Cost, us: float) -> float:
    return cost.nbytes / us / 1e3


def _positive(value: float | None) -> bool:
    """Whether a logarithmic axis can show it."""
    return value is not None and 0 < value < math.inf


def _axis(title: str, values: Sequence[float]) -> dict[str, object]:
    """A logarithmic axis around the values, with every tick written in full."""
    if not values:
        return {"type": "log", "title": {"text": title}}
    low, high = math.log10(min(values)), math.log10(max(values))
    room = max(0.08 * (high - low), 0.12)
    low, high = low - room, high + room
    digits: tuple[float, ...] = (1, 2, 5) if high - low < 2.5 else (1,)
    if high - low < 0.8:
        digits = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    step = max(1, math.ceil((high - low) / 7))
    powers = range(math.floor(low), math.ceil(high) + 1, step)
    ticks = [digit * 10.0**power for power in powers for digit in digits]
    return {
        "type": "log",
        "title": {"text": title},
        "range": [low, high],
        "tickvals": ticks,
        "ticktext": [_short(tick) if tick >= 1e6 else f"{tick:,.10g}" for tick in ticks],
    }


def _short(value: float) -> str:
    """The number with a prefix of the SI: "1.5 G"."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {prefix}"
    return f"{value:.3g} "


def _figure(height: int) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        showlegend=False,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": GREY},
        hoverlabel={"align": "left"},
    )
    lines = {"gridcolor": "rgba(128,128,128,.25)", "zeroline": False, "automargin": True}
    figure.update_xaxes(lines)
    figure.update_yaxes(lines)
    return figure


def _html(figure: go.Figure) -> str:
    config = {"responsive": True, "displaylogo": False, "displayModeBar": False}
    return str(
        figure.to_html(full_html=False, include_plotlyjs=False, config=config, default_width="100%")
    )
