"""The cost of steps, the device's ceilings, the margins, the page's plots and the progress bar."""

from __future__ import annotations

import io
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from attnmux.core import Request
from attnmux.testing.bench import (
    Ceilings,
    Cost,
    Row,
    Workload,
    ceilings,
    completed,
    cost_of,
    roofline,
)
from attnmux.testing.bench.cli import progress
from attnmux.testing.bench.margins import margins

DENSE = Request(num_q_heads=8, num_kv_heads=2, head_dim=64, dtype="bf16", kv_dtype="bf16")
REACHED = Ceilings(read_gbs=100.0, matmul_tflops=2.0)


@pytest.mark.parametrize(
    ("workload", "request_", "flops", "nbytes"),
    [
        # 10 keys: Q and O of 8 heads, new K and V of 2 read and stored, 10 keys' K and V read
        (
            "decode:ctx=10",
            DENSE,
            10 * 8 * 2 * 128,
            (2 * 8 * 64 + 2 * 2 * 64 + 2 * 2 * 64 + 10 * 2 * 128) * 2,
        ),
        # Stored in a byte: the new K and V are read in two
        (
            "decode:ctx=10",
            DENSE.replace(kv_dtype="fp8_e4m3"),
            10 * 8 * 2 * 128,
            (2 * 8 * 64 + 2 * 2 * 64) * 2 + 2 * 2 * 64 + 10 * 2 * 128,
        ),
        # A window of 3: itself and 3 before
        (
            "decode:bs=2,ctx=10",
            DENSE.replace(sliding_window=3),
            2 * 4 * 8 * 2 * 128,
            2 * (2 * 8 * 64 + 2 * 2 * 2 * 64 + 4 * 2 * 128) * 2,
        ),
        # Causal: 5 + 6 + 7 pairs, and all 7 keys are read once for each request
        (
            "extend:bs=2,new=3,prefix=4",
            DENSE,
            2 * (5 + 6 + 7) * 8 * 2 * 128,
            2 * (3 * 2 * 8 * 64 + 3 * 2 * 2 * 2 * 64 + 7 * 2 * 128) * 2,
        ),
        # The same in a window of 1: two keys each, and the first new token's own window is read
        (
            "extend:new=3,prefix=4",
            DENSE.replace(sliding_window=1),
            3 * 2 * 8 * 2 * 128,
            (3 * 2 * 8 * 64 + 3 * 2 * 2 * 2 * 64 + 4 * 2 * 128) * 2,
        ),
        # Absorbed MLA: a row of 512 + 64 is K and V, of all 16 heads
        (
            "decode:ctx=10",
            completed(Request(kind="mla")).replace(kv_dtype="bf16"),
            10 * 16 * 2 * (576 + 512),
            (16 * (576 + 512) + 2 * 576 + 10 * 576) * 2,
        ),
    ],
)
def test_the_cost_of_small_steps(workload, request_, flops, nbytes) -> None:
    cost = cost_of(Workload.parse(workload), request_)
    assert cost == Cost(flops=flops, nbytes=nbytes)
    assert cost.intensity == flops / nbytes


def test_shares_of_the_roof() -> None:
    assert REACHED.ridge == 20
    thin, thick = Cost(flops=10**6, nbytes=10**6), Cost(flops=10**8, nbytes=10**6)
    assert (REACHED.limit(thin), REACHED.limit(thick)) == ("bandwidth", "matmul")
    assert REACHED.share(thin, 20.0) == pytest.approx(0.5)  # 10 us at 100 GB/s
    assert REACHED.share(thick, 100.0) == pytest.approx(0.5)  # 50 us at 2 TFLOP/s
    assert str(Ceilings(read_gbs=2951.2, matmul_tflops=0.5)) == "2,951 GB/s, 500 GFLOP/s"


def test_ceilings_of_a_device() -> None:
    reached = ceilings(torch.device("cpu"), torch.float32, 0.01)
    assert 0.05 < reached.read_gbs < 5000
    assert 1e-4 < reached.matmul_tflops < 100


def test_a_cold_first_product_is_no_ceiling(monkeypatch) -> None:
    """Loading the library takes longer than all products may."""
    cold, multiply, sides = [0.3], torch.matmul, []

    def first_is_slow(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if cold:
            time.sleep(cold.pop())
        sides.append(len(left))
        return multiply(left, right)

    def once(run, seconds: float) -> float:
        run()
        return 10.0

    monkeypatch.setattr(torch, "matmul", first_is_slow)
    monkeypatch.setattr(roofline, "median_us", once)
    monkeypatch.setattr(roofline, "SIDES", (8, 32))
    ceilings(torch.device("cpu"), torch.float32, 0.2)
    assert max(sides) == 32


def measured(backend: str, *rounds_us: float, workload: str = "decode:ctx=10") -> Row:
    work = Workload.parse(workload)
    cost, us = cost_of(work, DENSE), sorted(rounds_us)[1]
    return Row(
        workload=work,
        backend=backend,
        status="measured",
        page_size=1,
        execution="eager",
        median_us=us,
        rounds_us=rounds_us,
        cost=cost,
        share=REACHED.share(cost, us),
        rms_error=0.5,
        worst_error=1.5,
    )


def failed(backend: str, workload: str = "decode:ctx=10") -> Row:
    work = Workload.parse(workload)
    return Row(workload=work, backend=backend, status="failed", page_size=1, execution="eager")


def decision(backend: str, *ranges: tuple[int, int | None, str]) -> SimpleNamespace:
    """As much of a decision as names the backend of a step."""
    return SimpleNamespace(
        phases={"decode": SimpleNamespace(address=backend)},
        decode_sizes=[
            SimpleNamespace(least=least, most=most, choice=SimpleNamespace(address=name))
            for least, most, name in ranges
        ],
    )


def test_the_margin_of_the_fastest() -> None:
    rows = [measured("a", 12.0, 11.0, 13.0), measured("b", 10.0, 9.0, 10.0), failed("c")]
    (margin,) = margins(rows, decision("a"))
    assert (margin.fastest.backend, margin.second.backend) == ("b", "a")
    assert margin.ratio == pytest.approx(1.2)
    assert margin.noise == pytest.approx((11 / 10, 13 / 9))
    assert margin.is_clear
    assert margin.cost_of_choice == pytest.approx(1.2)
    assert str(margin) == (
        "fastest: b, 1.20 times as fast as a (1.10 to 1.44 over the rounds); "
        "chosen: a, 1.20 times as long"
    )


def test_a_margin_within_the_noise() -> None:
    rows = [measured("a", 12.0, 11.0, 13.0), measured("b", 10.0, 9.0, 12.0)]
    (margin,) = margins(rows, None)
    assert not margin.is_clear
    assert str(margin).endswith("(0.92 to 1.44 over the rounds, within the noise)")


def test_a_choice_by_batch_size_that_was_not_timed() -> None:
    workloads = "decode:bs=1,ctx=10", "decode:bs=4,ctx=10", "decode:bs=8,ctx=10"
    rows = [measured("a", 2.0, 2.0, 2.0, workload=each) for each in workloads]
    rows.append(failed("a", "decode:bs=9,ctx=10"))
    found = margins(rows, decision("a", (2, 4, "b"), (8, None, "c")))
    assert [each.chosen for each in found] == ["a", "b", "c"]
    assert [each.cost_of_choice for each in found] == [1.0, None, None]
    assert str(found[1]) == "fastest: a; chosen: b, not timed"


def plots(*names: str):
    page = pytest.importorskip("attnmux.testing.bench.cli.page", exc_type=ImportError)
    return page, *(getattr(page, name) for name in names)


def test_curves_differ_in_length_alone() -> None:
    page, curves = plots("curves")
    texts = (
        *("decode:bs=1,ctx=40", "decode:bs=1,ctx=9", "decode:bs=4,ctx=9"),
        *("extend:new=8", "extend:new=16", "extend:new=8,prefix=8", "extend:new=8,prefix=16"),
    )
    found = curves([measured("a", 1.0, 2.0, 3.0, workload=text) for text in texts])
    assert {title: [str(row.workload) for row in rows] for title, rows in found.items()} == {
        "decode, 1 request": ["decode:bs=1,ctx=9", "decode:bs=1,ctx=40"],
        "extend, 1 request, no prefix": [
            "extend:bs=1,new=8,prefix=0",
            "extend:bs=1,new=16,prefix=0",
        ],
        "extend, 1 request, 8 new tokens each": [
            "extend:bs=1,new=8,prefix=8",
            "extend:bs=1,new=8,prefix=16",
        ],
        page.SINGLE: ["decode:bs=4,ctx=9"],
    }


def test_points_of_the_plots() -> None:
    _, roofline, times, errors, styles = plots("roofline", "times", "errors", "styles")
    texts = ("decode:ctx=9", "decode:ctx=40")
    rows = [measured("a", 1.0, 2.0, 4.0, workload=text) for text in texts]
    rows += [measured("b", 3.0, 3.0, 3.0, workload="extend:new=8"), failed("c")]
    style = styles(rows)
    assert len({each[0] for each in style.values()}) == 3
    roof, decode, extend = roofline(rows, REACHED, style).data
    assert roof.x[1] == 20
    assert roof.y[1:] == (2e12, 2e12)
    assert roof.y[0] == pytest.approx(roof.x[0] * 1e11)
    assert decode.x == tuple(row.cost.intensity for row in rows[:2])
    assert decode.y == pytest.approx([row.cost.flops / 2.0 * 1e6 for row in rows[:2]])
    assert "<b>a</b><br>decode:bs=1,ctx=9, page 1, eager<br>2.0 us" in decode.text[0]
    assert "of the roof" in decode.text[0]
    assert extend.marker.symbol.endswith("-open")
    (line,) = times(rows[:2], style).data
    assert (line.x, line.y) == ((9, 40), (2.0, 2.0))
    assert (line.error_y.array, line.error_y.arrayminus) == ((2.0, 2.0), (1.0, 1.0))
    assert [line.y for line in errors(rows[:2], style).data] == [(0.5, 0.5), (1.5, 1.5)]
    (points,) = times(rows[2:], style, joined=False).data
    assert (points.x, points.mode) == (("extend:bs=1,new=8,prefix=0",), "markers")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_names_what_runs(monkeypatch, terminal) -> None:
    drawn = io.StringIO()
    console = Console(file=drawn, force_terminal=terminal, width=100)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    bar = progress.Bar()
    for item in bar.track([1, 2], "at first", 2):
        bar.say(f"compiling [{item}]")
    for text in ("at first", "compiling [1]", "compiling [2]"):
        assert (text in drawn.getvalue()) == terminal
    assert terminal or not drawn.getvalue()
