"""The error where nothing serves the request: the unserved phases, and the nearest fixes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attnmux.core.choosing.ask.values import PHASES
from attnmux.core.choosing.common.verdict import Reason, Verdict
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.machine.vendors import VENDORS
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.search.problem import Group
from attnmux.core.errors import NoBackend


def refusal(
    platform: Platform, groups: Sequence[Group], candidates: Sequence[Verdict]
) -> NoBackend:
    """The error: the phases that nothing serves, and each candidate's reasons there."""
    where = platform.name or str(platform)
    if not candidates:
        line = f"pip install {VENDORS.get(platform.vendor, VENDORS['cpu']).distribution}"
        hint = f"{line}, unless it is there and did not load or is not allowed"
        return NoBackend(f"no attention backend for {where}: no plugin offers one ({hint})")
    failing = [group for group in groups if not _is_served(group, candidates)]
    named = sorted({group.named for group in failing if group.named})
    who = f"{' and '.join(named)} cannot serve" if named else "no attention backend serves"
    sources = dict.fromkeys(f"{g.named} is {g.source}" for g in failing if g.source)
    unserved = {phase for group in failing for phase in group.phases}
    phases = ", ".join(phase for phase in PHASES if phase in unserved)
    eligible = {key for group in failing for offer in group.offers for key in _keys(group, offer)}
    concerned = [v for v in candidates if v.reasons and (v.address, v.phase) in eligible]
    near, others = (concerned, []) if named else _set_apart(concerned)
    lines = [f"  {which}: {why}" for which, why in _grouped(sorted(near, key=_distance))]
    lines += [f"  for {what}: {', '.join(names)}" for what, names in others]
    encoder = any("encoder" in group.phases for group in failing)
    said = [*sources, *(["multimodal=false asks for no encoder"] if encoder else ())]
    hint = f" ({'; '.join(said)})" if said else ""
    return NoBackend("\n".join([f"{who} {phases} on {where}{hint}", *lines]), candidates)


def _is_served(group: Group, candidates: Sequence[Verdict]) -> bool:
    """Whether one of the group's offers serves all its phases."""
    serving = {(v.address, v.phase) for v in candidates if v.verdict != "rejected"}
    return any(serving.issuperset(_keys(group, offer)) for offer in group.offers)


def _set_apart(concerned: Sequence[Verdict]) -> tuple[list[Verdict], list[tuple[str, list[str]]]]:
    """(verdicts worth reading, the others' purpose and names). Backends for another vendor or
    another kind of attention are set apart, unless no other is left."""
    near = list(concerned)
    others = []
    for axis, what in (("vendor", "other hardware"), ("kind", "other kinds of attention")):
        left = [said for said in near if all(reason.axis != axis for reason in said.reasons)]
        names = sorted({said.backend for said in near} - {said.backend for said in left})
        if left and names:
            near = left
            others.append((what, names))
    return near, others


def _keys(group: Group, offer: Offer) -> list[tuple[str, str]]:
    return [(offer.address, phase) for phase in group.phases]


def _distance(verdict: Verdict) -> tuple[int, int, str]:
    unfixable = sum(not reason.hint for reason in verdict.reasons)
    return unfixable, len(verdict.reasons), verdict.backend


def _grouped(verdicts: Sequence[Verdict]) -> list[tuple[str, str]]:
    """(backend and its phases, reasons), one entry where a backend's phases share the reasons.

    Phases that the backend does not serve at all share one reason.
    """
    phases: dict[tuple[str, str, tuple[Reason, ...]], list[str]] = {}
    for each in verdicts:
        reasons = tuple(
            replace(reason, wanted="") if reason.code == "PHASE" else reason
            for reason in each.reasons
        )
        phases.setdefault((each.backend, each.plugin, reasons), []).append(each.phase)
    return [
        (
            f"{backend} ({plugin}) for {', '.join(served)}",
            "; ".join(
                str(reason if reason.wanted else replace(reason, wanted=", ".join(served)))
                for reason in reasons
            ),
        )
        for (backend, plugin, reasons), served in phases.items()
    ]
