"""The part of `attnmux bench` that needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from attnmux.bench.cli.bench_place import Place
from attnmux.bench.field import Field, field_of
from attnmux.bench.measuring import Bench, Row
from attnmux.bench.timing import Ceilings, ceilings
from attnmux.bench.workload import Workload
from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.ask.request import Request
from attnmux.core.dtypes import torch_dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What was timed, and who was not."""

    place: Place
    request: Request
    ceilings: Ceilings
    field: Field
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "platform": self.place.platform.to_dict(),
            "device": self.place.device,
            "request": self.request.to_dict(),
            "ceilings": asdict(self.ceilings),
            "rows": [row.to_dict() for row in self.rows],
            "refused": [
                {
                    "backend": each.offer.address,
                    "phase": each.phase,
                    "reasons": [reason.to_dict() for reason in each.reasons],
                }
                for each in self.field.refused
            ],
        }


def measured(
    place: Place,
    request: Request,
    policy: Policy,
    *,
    workloads: Sequence[Workload],
    names: Sequence[str],
    seconds: float,
    show: bool,
) -> Result:
    """Time all of it; `show`: with a progress bar. Raises as `field_of`."""
    device = torch.device(place.device)
    field = field_of(
        request,
        place.platform,
        device,
        place.offers,
        policy,
        workloads=workloads,
        names=names,
    )
    reached = ceilings(device, torch_dtype(request.dtype or ""), seconds)
    bench = Bench(
        device=device,
        ceilings=reached,
        graphs=field.graphs,
        seconds=seconds,
        launches=place.launches,
    )
    coming = bench.rows(field.workloads, field.subjects)
    if show:
        from attnmux.bench.cli.bench_report import track  # noqa: PLC0415  # rich, off the JSON path

        coming = track(coming, field.size, f"timing on {place}")
    return Result(place=place, request=request, ceilings=reached, field=field, rows=tuple(coming))
