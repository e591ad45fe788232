"""`attnmux bench`: every backend of this machine on the same steps, timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from attnmux.core.benching.workload import GRAMMAR, Workload, completed
from attnmux.core.choosing.card import Offer
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.request import Request
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.core.cli.select import machine, requested
from attnmux.core.errors import InvalidInput, NoBackend
from attnmux.core.settings import Settings

if TYPE_CHECKING:
    from attnmux.core.benching.field import Field
    from attnmux.core.benching.measuring import Row
    from attnmux.core.benching.timing import Ceilings

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
    as_json: bool,
) -> int:
    """Time every backend that serves a request here, or those that are named.

    A figure is the median time of one layer's call as a model makes it, the write of the new
    tokens' K and V included, from a device graph where there is one. All are given the same values
    on scattered pages, and an answer is checked before it is timed. Exits with 0 when something was
    measured, 3 when nothing was.
    """
    workloads = [Workload.parse(text) for text in texts]
    request = completed(requested(model, fields, tp, None))
    settings = run.settings()
    place = find_place(run, settings, platform, device)
    with needing_torch():
        import torch  # noqa: PLC0415  # after the names are known

        from attnmux.core.benching.field import field_of  # noqa: PLC0415
        from attnmux.core.benching.measuring import Bench  # noqa: PLC0415
        from attnmux.core.benching.timing import ceilings  # noqa: PLC0415
        from attnmux.core.dtypes import torch_dtype  # noqa: PLC0415
    target = torch.device(place.device)
    field = field_of(
        request,
        place.platform,
        target,
        place.offers,
        settings.policy(),
        workloads=workloads,
        names=names,
    )
    reached = ceilings(target, torch_dtype(request.dtype or ""), seconds)
    timing = Bench(device=target, ceilings=reached, graphs=field.graphs, seconds=seconds)
    coming = timing.rows(field.workloads, field.subjects)
    if as_json:
        rows = list(coming)
        echo_json(_as_json(run, place, request, reached, rows, field))
    else:
        from attnmux.core.cli.bench_report import report, track  # noqa: PLC0415  # rich, off the JSON path

        rows = list(track(coming, field.size, place.said))
        report(place.said, request, reached, rows, field.refused)
    return 0 if any(row.status == "measured" for row in rows) else NOTHING_MEASURED


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where steps are timed, and who may take part."""

    platform: Platform
    device: str
    """torch's word."""
    offers: tuple[Offer, ...]

    @property
    def said(self) -> str:
        return self.platform.name or str(self.platform)


def find_place(run: Run, settings: Settings, platform: str | None, device: str) -> Place:
    """Raises InvalidInput for a machine that is not here, and for another platform's device."""
    plugins = run.plugins(settings)
    here, hypothetical = machine(run, settings, plugins, platform)
    if hypothetical:
        raise InvalidInput("--platform", came=platform, expected="a vendor that is on this machine")
    if device and device.partition(":")[0] != here.device_type:
        expected = f"{here.device_type}, as torch calls {here}, or {here.device_type}:NUMBER"
        raise InvalidInput("--device", came=repr(device), expected=expected)
    return Place(platform=here, device=device or here.device_type, offers=plugins.offers())


def _as_json(
    run: Run,
    place: Place,
    request: Request,
    reached: Ceilings,
    rows: Sequence[Row],
    field: Field,
) -> dict[str, Any]:
    return {
        "platform": place.platform.to_dict(),
        "device": place.device,
        "request": request.to_dict(),
        "ceilings": asdict(reached),
        "rows": [row.to_dict() for row in rows],
        "refused": [
            {
                "backend": each.offer.address,
                "phase": each.phase,
                "reasons": [reason.to_dict() for reason in each.reasons],
            }
            for each in field.refused
        ],
        "warnings": run.warnings,
    }
