"""`attnmux bench`: every backend of this machine on the same steps, timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click

from attnmux.bench.cli.bench_keep import Keeper
from attnmux.bench.cli.bench_place import find_place
from attnmux.bench.workload import GRAMMAR, Workload, check_stated, completed
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.core.cli.select import requested
from attnmux.core.errors import NoBackend

NOTHING_MEASURED = 3


@click.command()
@click.option("--request", "fields", default="", help="FIELD=VALUE,…: num_q_heads=64,page_size=16")
@click.option("--model", help="A folder with a Hugging Face config.json.")
@click.option("--tp", type=click.IntRange(min=1), default=1, help="Ranks that share the heads.")
@click.option("--backend", "names", multiple=True, help="Only this one; may be repeated.")
@click.option(
    "--workload",
    "texts",
    multiple=True,
    help=f"{GRAMMAR}; may be repeated. [default: what such a device serves]",
)
@click.option("--platform", help="A vendor, where several are here.")
@click.option("--device", default="", help="torch's word: cuda:1, … [default: the first]")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=0.3,
    show_default=True,
    help="Least time for one figure.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Let the choices on this machine go by the figures, after a conformance check.",
)
@click.option(
    "--check-seconds",
    type=click.FloatRange(min=0),
    default=60,
    show_default=True,
    help="Most time for the check of one backend in one phase, with --keep.",
)
@common_options
@pass_run
def bench(
    run: Run,
    fields: str,
    model: str | None,
    tp: int,
    names: tuple[str, ...],
    texts: tuple[str, ...],
    platform: str | None,
    device: str,
    seconds: float,
    keep: bool,
    check_seconds: float,
    as_json: bool,
) -> int:
    """Time every backend that serves a request here, or those that are named.

    A figure is the median time of one layer's call as a model makes it, the write of the new
    tokens' K and V included, from a device graph where there is one. All are given the same values
    on scattered pages, and an answer is checked before it is timed. Exits with 0 when something was
    timed, 3 when nothing was.
    """
    workloads = [Workload.parse(text) for text in texts]
    asked = requested(model, fields, tp, None)
    if keep:
        check_stated(asked)
    request = completed(asked)
    settings = run.settings()
    place = find_place(run, settings, platform, device)
    keeper = Keeper.opened(run, settings, asked, place) if keep else None
    with needing_torch():
        from attnmux.bench.cli.bench_timing import measured  # noqa: PLC0415  # torch
    result = measured(
        place,
        request,
        settings.policy(),
        workloads=workloads,
        names=names,
        seconds=seconds,
        show=not as_json,
    )
    kept = None if keeper is None else keeper.keep(result, check_seconds, show=not as_json)
    if as_json:
        answer = result.to_dict() if kept is None else {**result.to_dict(), "kept": kept.to_dict()}
        echo_json({**answer, "warnings": run.warnings})
    else:
        from attnmux.bench.cli.bench_report import report  # noqa: PLC0415  # rich, off the JSON path

        report(result, kept)
    return 0 if any(row.status == "measured" for row in result.rows) else NOTHING_MEASURED


@contextmanager
def needing_torch() -> Iterator[None]:
    """Raises NoBackend instead where torch is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise NoBackend(
            "timing runs the backends, which needs torch: pip install 'attnmux-core[torch]'"
        ) from error
