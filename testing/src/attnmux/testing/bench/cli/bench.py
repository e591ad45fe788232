"""`attnmux bench`: times every backend of this machine on the same steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnmux.core import InvalidInput, NoBackend
from attnmux.core.plugin import Files
from attnmux.core.verbs import FiniteRange, Run, common_options, writing
from attnmux.testing.bench.cli.asked import asked_of_one_shape, read_share
from attnmux.testing.bench.shapes import check_stated, completed, kept_shape
from attnmux.testing.bench.workload import GRAMMAR, Workload

if TYPE_CHECKING:
    from attnmux.testing.bench.cli.bench_run import Kept, Result

NOTHING_MEASURED = 3
SECONDS, CHECK_SECONDS = 0.3, 60.0
PAGE_NEEDS = "plotly", "jinja2"


@click.command()
@click.option(
    "--request",
    "fields",
    multiple=True,
    help="FIELD=VALUE,…: num_q_heads=64,page_size=16; repeatable.",
)
@click.option("--model", help="A folder with a Hugging Face config.json.")
@click.option("--assume", is_flag=True, help="Read an unknown model_type as causal attention.")
@click.option("--tp", type=click.IntRange(min=1), default=1, help="Ranks that share the heads.")
@click.option("--backend", "names", multiple=True, help="Time only this backend; repeatable.")
@click.option(
    "--workload",
    "texts",
    multiple=True,
    help=f"{GRAMMAR}; repeatable. [default: typical sizes for the device]",
)
@click.option("--platform", help="A vendor, if the machine has devices of several.")
@click.option("--device", default="", help="A torch device, as in cuda:1. [default: the first]")
@click.option(
    "--seconds",
    type=FiniteRange(min=0, min_open=True),
    show_default="0.3, with --ship 0.06",
    help="Minimum time for one figure.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Check conformance, and let choices on this machine follow the figures.",
)
@click.option(
    "--check-seconds",
    type=FiniteRange(min=0),
    show_default="60, with --ship 1",
    help="Maximum time to check one backend in one phase, with --keep or --ship.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write a page: the choice, the roofline, time and error (attnmux-testing[html]).",
)
@click.option(
    "--ship",
    type=click.Path(path_type=Path),
    help="Measure many shapes into a file that a plugin can carry for this kind of device, in this "
    "folder or of this name. The same command goes on where it ended.",
)
@click.option(
    "--minutes",
    type=FiniteRange(min=0, min_open=True),
    default=5,
    show_default=True,
    help="Time for --ship.",
)
@click.option(
    "--share",
    callback=read_share,
    default="1/1",
    help="The part of --ship that this process measures: 1/2 and 2/2 of two processes, which may "
    "write the same file.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=0),
    default=0,
    help="Processes that compile, for --ship.",
)
@common_options
def bench(
    run: Run,
    fields: tuple[str, ...],
    model: str | None,
    assume: bool,
    tp: int,
    names: tuple[str, ...],
    texts: tuple[str, ...],
    platform: str | None,
    device: str,
    seconds: float | None,
    keep: bool,
    check_seconds: float | None,
    html: Path | None,
    ship: Path | None,
    minutes: float,
    share: tuple[int, int],
    jobs: int,
    as_json: bool,
) -> int:
    """Time the backends that serve a request here.

    A figure is the median time of one layer's call as a model makes it, which also stores the new
    tokens' K and V; decode runs from a device graph where there is one. All backends get the same
    values on scattered pages, and their answers are checked first. Errors are against float64 on
    the same inputs, in units of the rounding of the output's format (eps / 2). Processes that
    torchrun started measure at the same time, each on a device of its own, and a figure is that of
    the slowest. Exits with 0 when something was timed, 3 when nothing was.
    """
    if ship is not None:
        of_one_shape = {"--request": fields, "--model": model, "--workload": texts, "--keep": keep}
        _check_alone({**of_one_shape, "--html": html})
        given: dict[str, Any] = {
            "names": names,
            "platform": platform,
            "device": device,
            "seconds": seconds,
        }
        given |= {"check_seconds": check_seconds, "minutes": minutes, "share": share, "jobs": jobs}
        return _ship(run, ship, given, as_json=as_json)
    seconds = SECONDS if seconds is None else seconds
    check_seconds = CHECK_SECONDS if check_seconds is None else check_seconds
    if html is not None:
        _check_page(html)
    workloads = [Workload.parse(text) for text in texts]
    asked = asked_of_one_shape(model, fields, tp, assume=run.warn if assume else None)
    if keep:
        check_stated(asked)
    request = completed(asked)
    with _needing_torch():
        from attnmux.testing.bench.cli import bench_run  # noqa: PLC0415  # torch
    settings = run.settings()
    place = bench_run.find_place(run, settings, platform, device)
    keeper = bench_run.Keeper.open(run, settings, kept_shape(asked), place) if keep else None
    from attnmux.testing.bench.cli.progress import Bar  # noqa: PLC0415  # rich, after the refusals

    bar = Bar(hidden=not place.tells)
    result = bench_run.measure(
        place,
        request,
        settings.policy(),
        workloads=workloads,
        names=names,
        seconds=seconds,
        measurements=run.measurements(settings) if keeper is None else keeper.known,
        bar=bar,
    )
    if html is not None and place.tells:
        from attnmux.testing.bench.cli.page import write_page  # noqa: PLC0415  # plotly, an extra

        with writing(html, otherwise="name another file as --html"):
            write_page(result, html)
    kept = None if keeper is None else keeper.keep(result, check_seconds, bar)
    if place.tells:
        _tell(run, result, kept, as_json=as_json)
    return 0 if any(row.status == "measured" for row in result.rows) else NOTHING_MEASURED


@contextmanager
def _needing_torch() -> Iterator[None]:
    """Turn a missing torch into a NoBackend that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise NoBackend(
            "timing runs the backends, which needs torch: pip install 'attnmux-core[torch]'"
        ) from error


def _check_alone(others: Mapping[str, object]) -> None:
    """Raise InvalidInput for options that --ship does not go with."""
    if given := [name for name, value in others.items() if value]:
        expected = "none of them with --ship, which has shapes and steps of its own"
        raise InvalidInput(given[0], got=", ".join(given), expected=expected)


def _ship(run: Run, path: Path, given: dict[str, Any], *, as_json: bool) -> int:
    with _needing_torch():
        from attnmux.testing.bench.cli import ship  # noqa: PLC0415  # torch
    told = ship.ship(run, path, **given)
    if as_json:
        run.echo_json({**told, "warnings": run.warnings})
    else:
        ship.tell(told)
    return 0 if told["bytes"] else NOTHING_MEASURED


def _tell(run: Run, result: Result, kept: Kept | None, *, as_json: bool) -> None:
    if as_json:
        answer = result.to_dict() if kept is None else {**result.to_dict(), "kept": kept.to_dict()}
        run.echo_json({**answer, "warnings": run.warnings})
    else:
        from attnmux.testing.bench.cli.tables import print_bench  # noqa: PLC0415  # rich, off the JSON path

        print_bench(result, kept)


def _check_page(file: Path) -> None:
    """Raise InvalidInput, before minutes of timing, where the page cannot be made."""
    if missing := [name for name in PAGE_NEEDS if importlib.util.find_spec(name) is None]:
        expected = f"{' and '.join(PAGE_NEEDS)}: pip install 'attnmux-testing[html]'"
        raise InvalidInput("--html", got=f"no {' and no '.join(missing)}", expected=expected)
    Files.check_replaceable("--html", file)
