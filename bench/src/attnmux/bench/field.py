"""Who is timed on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnmux.bench.subjects import Refused, Subject, find_subjects
from attnmux.bench.workload import Workload, default_grid
from attnmux.core.choosing.ask.policy import Policy
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import GraphUnsupported, InvalidInput, NoBackend
from attnmux.core.graph.devices import DeviceGraphs, device_graphs


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """The workloads, the backends that are timed on them, and those that are not."""

    workloads: tuple[Workload, ...]
    subjects: tuple[Subject, ...]
    refused: tuple[Refused, ...]
    graphs: DeviceGraphs | None
    """Of the device; None where it has none."""

    @property
    def size(self) -> int:
        """Rows that come of it."""
        phases = [subject.phase for subject in self.subjects]
        return sum(phases.count(each.phase) for each in self.workloads)


def field_of(
    request: Request,
    platform: Platform,
    device: torch.device,
    offers: Sequence[Offer],
    policy: Policy,
    *,
    workloads: Sequence[Workload] = (),
    names: Sequence[str] = (),
) -> Field:
    """workloads: instead of the default grid of the phases that are asked for. names: the only
    backends to time.

    Raises InvalidInput for a request without a phase that is timed, and for a device that torch
    does not have; NoBackend, with the reasons, where no backend serves any of the workloads.
    """
    phases = [phase for phase in ("decode", "extend") if phase in request.phases]
    if not workloads:
        itemsize = torch_dtype(request.kv_dtype or request.dtype or "").itemsize
        grid = default_grid(request, platform, itemsize)
        workloads = tuple(each for each in grid if each.phase in phases)
    for workload in workloads:
        if workload.phase not in phases:
            expected = f"one of {' and '.join(phases)}, the phases that are asked for"
            raise InvalidInput("workload", came=str(workload), expected=expected)
    if not workloads:
        came = f"phases={'+'.join(request.phases)} on {platform}"
        expected = "decode or extend, on a device whose memory holds a workload of the default grid"
        raise InvalidInput("request", came=came, expected=expected)
    graphs = graphs_of(device)
    subjects, refused = find_subjects(
        request,
        platform,
        offers,
        policy,
        names=names,
        phases=sorted({workload.phase for workload in workloads}),
        graphs=graphs is not None,
    )
    if not subjects:
        told = dict.fromkeys(f"{each.offer.address}: {each.why}" for each in refused)
        said = "; ".join(told) or "no plugin offers one for it"
        raise NoBackend(f"no backend serves this on {platform.name or platform}: {said}")
    return Field(
        workloads=tuple(workloads), subjects=tuple(subjects), refused=tuple(refused), graphs=graphs
    )


def graphs_of(device: torch.device) -> DeviceGraphs | None:
    """None for a device without graphs. Raises InvalidInput for one that torch does not have."""
    try:
        torch.empty(1, device=device)
        return device_graphs(device)
    except GraphUnsupported:
        return None
    except (RuntimeError, AssertionError, ImportError) as error:
        expected = f"a device of this torch: {error}"
        raise InvalidInput("device", came=str(device), expected=expected) from error
