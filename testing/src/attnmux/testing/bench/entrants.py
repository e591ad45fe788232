"""Which backends are timed on which workloads, and why the others are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from attnmux.core import (
    Choice,
    Decision,
    DeviceGraphs,
    InvalidInput,
    NoBackend,
    Offer,
    Platform,
    Policy,
    Reason,
    Request,
    solve,
    torch_dtype,
)
from attnmux.core.verbs import offers_named
from attnmux.testing.bench.grid import default_grid
from attnmux.testing.bench.shapes import value_bytes
from attnmux.testing.bench.timing import graphs_of
from attnmux.testing.bench.workload import Workload

NAMED_FOR = {
    "decode": "decode_backend",
    "extend": "prefill_backend",
    "verify": "prefill_backend",
}
"""The policy's field that names the backend of one phase alone."""

IN_GRAPHS = ("decode", "verify")
"""The phases that engines replay from device graphs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entrant:
    """A backend that serves a phase of the request and is timed."""

    offer: Offer
    phase: str
    decision: Decision
    """For this backend and phase alone, so that it has its preferred page size."""
    in_graph: bool
    """Whether its steps are timed from device graphs."""

    @property
    def choice(self) -> Choice:
        return self.decision.phases[self.phase]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A backend that does not serve a phase of the request here."""

    offer: Offer
    phase: str
    reasons: tuple[Reason, ...]
    """Empty where only its companions refuse."""

    @property
    def why(self) -> str:
        return str(self.reasons[0]) if self.reasons else "does not serve this request as it is"


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """The workloads, the backends that are timed on them, and those that are not."""

    workloads: tuple[Workload, ...]
    entrants: tuple[Entrant, ...]
    refused: tuple[Refused, ...]
    graphs: DeviceGraphs | None
    """None for a device without graphs."""

    @property
    def size(self) -> int:
        """Rows of the result: pairs of a workload and a backend that serves its phase."""
        phases = [entrant.phase for entrant in self.entrants]
        return sum(phases.count(each.phase) for each in self.workloads)


def make_field(
    request: Request,
    platform: Platform,
    device: torch.device,
    offers: Sequence[Offer],
    policy: Policy,
    *,
    workloads: Sequence[Workload] = (),
    names: Sequence[str] = (),
) -> Field:
    """Pick workloads and backends for a request.

    workloads: by default, the default grid for the request's phases. names: the only backends to
    time; by default, all.
    Raises InvalidInput for a request without a phase that is timed, and for a device that torch
    does not have; NoBackend, with the reasons, where no backend serves any of the workloads.
    """
    phases = [phase for phase in NAMED_FOR if phase in request.phases]
    if not workloads:
        itemsize = value_bytes(torch_dtype(request.kv_dtype or request.dtype or ""))
        grid = default_grid(request, platform, itemsize)
        workloads = tuple(each for each in grid if each.phase in phases)
    for workload in workloads:
        if workload.phase not in phases:
            expected = f"one of {' and '.join(phases)}, the request's phases"
            raise InvalidInput("workload", got=str(workload), expected=expected)
        if workload.phase == "verify":
            _check_chain(workload, request)
    if not workloads:
        got = f"phases={'+'.join(request.phases)} on {platform}"
        expected = "decode or extend, on a device whose memory holds a workload of the default grid"
        raise InvalidInput("request", got=got, expected=expected)
    graphs = graphs_of(device)
    entrants, refused = find_entrants(
        request,
        platform,
        offers,
        policy,
        names=names,
        phases=sorted({workload.phase for workload in workloads}),
        graphs=graphs is not None,
    )
    if not entrants:
        reasons = dict.fromkeys(f"{each.offer.address}: {each.why}" for each in refused)
        said = "; ".join(reasons) or "no plugin offers one for it"
        raise NoBackend(f"no backend serves this on {platform.name or platform}: {said}")
    return Field(
        workloads=tuple(workloads), entrants=tuple(entrants), refused=tuple(refused), graphs=graphs
    )


def find_entrants(
    request: Request,
    platform: Platform,
    offers: Sequence[Offer],
    policy: Policy,
    *,
    names: Sequence[str] = (),
    phases: Sequence[str] = tuple(NAMED_FOR),
    graphs: bool = False,
) -> tuple[list[Entrant], list[Refused]]:
    """The backends that are timed, and those that refuse the request.

    Backends for other vendors' devices are in neither list, unless `names` has
    them. names: the only backends to consider; by default, all. graphs: whether the device has
    graphs. Decode and verification are timed from one where the card declares graphs.
    Raises UnknownBackend and InvalidInput for names that cannot be used.
    """
    named = {offer.address: offer for name in names for offer in offers_named(name, offers)}
    entrants, refused = [], []
    for offer in named.values() if names else offers:
        for phase in phases:
            in_graph = graphs and phase in IN_GRAPHS
            answer = _decide_alone(request, platform, offers, policy, offer, phase, in_graph)
            if not _serves(answer, offer, phase) and in_graph and not request.graph:
                in_graph = False
                answer = _decide_alone(request, platform, offers, policy, offer, phase, in_graph)
            if isinstance(answer, Decision) and _serves(answer, offer, phase):
                entrants.append(
                    Entrant(offer=offer, phase=phase, decision=answer, in_graph=in_graph)
                )
                continue
            reasons = _reasons(answer, offer)
            # A backend for another vendor's devices says nothing about this machine
            if names or not any(reason.axis == "vendor" for reason in reasons):
                refused.append(Refused(offer=offer, phase=phase, reasons=reasons))
    return entrants, refused


def _check_chain(workload: Workload, request: Request) -> None:
    if request.spec_topk != 1 or request.spec_draft_tokens != workload.new:
        got = f"{workload} with spec_topk={request.spec_topk},"
        got += f"spec_draft_tokens={request.spec_draft_tokens}"
        expected = f"spec_topk=1,spec_draft_tokens={workload.new}: chains of drafts are timed"
        raise InvalidInput("workload", got=got, expected=expected)


def _decide_alone(
    request: Request,
    platform: Platform,
    offers: Sequence[Offer],
    policy: Policy,
    offer: Offer,
    phase: str,
    in_graph: bool,
) -> Decision | NoBackend:
    """Decide one phase with one backend named. The request is not coerced for it, and asks for no
    accuracy: the benchmark measures it."""
    asked = request.replace(phases=(phase,), max_error=None)
    if phase == "verify":
        # An engine's backend for prompts verifies too
        asked = asked.replace(phases=("extend", phase), speculative_attention_mode="prefill")
    if in_graph:
        asked = asked.replace(graph=True)
    unnamed = dict.fromkeys(Policy.NAMING)
    named = {**unnamed, NAMED_FOR[phase]: offer.address}
    alone = replace(policy, **named, allow_coercion=False)  # type: ignore[arg-type]  # names by field
    try:
        return solve(asked, platform, offers, alone)
    except NoBackend as refusal:
        return refusal


def _serves(answer: Decision | NoBackend, offer: Offer, phase: str) -> bool:
    """Whether the backend itself serves the phase, and not one of its companions."""
    return isinstance(answer, Decision) and answer.phases[phase].address == offer.address


def _reasons(answer: Decision | NoBackend, offer: Offer) -> tuple[Reason, ...]:
    """Reasons against the backend."""
    for verdict in answer.candidates:
        if (verdict.plugin, verdict.backend) == (offer.plugin, offer.card.name):
            return verdict.reasons
    return ()
