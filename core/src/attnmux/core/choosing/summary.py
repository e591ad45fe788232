"""A decision in one line."""

from __future__ import annotations

from typing import Any

from attnmux.core.choosing.choice import Choice
from attnmux.core.choosing.parts import Parts, absence


def summary(decision: Any, parts: Parts) -> str:  # noqa: ANN401  # a Decision, whose module imports this one
    """One line: the backend of each phase, the machine, and why each backend won."""
    clauses = _said(decision, parts)
    for group, other in zip(decision.request.other_layers, decision.others, strict=True):
        clauses += [f"for {group}: {'; '.join(_said(other, parts))}"]
    where = decision.platform.name or str(decision.platform)
    stored = f"page size {decision.page_size}, KV in {decision.kv_dtype}"
    notes = [*decision.notes, *(note for other in decision.others for note in other.notes)]
    noted = "".join(f"; note: {note}" for note in notes)
    return f"{'; '.join(clauses)}; on {where}, {stored}{noted}"


def _said(decision: Any, parts: Parts) -> list[str]:  # noqa: ANN401  # as above
    """The backends of one group of layers, and its parts."""
    served: dict[str, list[str]] = {}
    known = {name: parts(name) for name in decision.parts}
    elsewhere = {
        phase
        for part in known.values()
        if part is not None
        for phase, (ask, _) in part.phases.items()
        if ask
    }
    for phase, choice in decision.phases.items():
        if phase not in elsewhere:
            served.setdefault(choice.address, []).append(phase)
    clauses = []
    for phases in served.values():
        won = decision.phases["decode" if "decode" in phases else phases[0]]
        clauses.append(f"{won} serves {_listed(phases)}, {_standing(decision, won, phases)}")
    clauses += [
        f"{size.choice} serves decode of {size} requests, "
        f"saving at least {size.gain:.0%} of the time (measured)"
        for size in decision.decode_sizes
    ]
    for name, part in known.items():
        subject = decision.request, decision.parts[name]
        clauses += [absence(name)] if part is None else part.lines(*subject)
    if decision.request.compressed_layers:
        layers = [f"{count} {kind}" for kind, count in decision.request.compressed_layers]
        clauses.append(
            "the engine, such as attnmux-transformers, serves the keys of blocks in "
            f"{_listed(layers)} layers, merged with their windows by LSE"
        )
    return clauses


def _standing(decision: Any, choice: Choice, phases: list[str]) -> str:  # noqa: ANN401  # as above
    """How a winner stood among the candidates of the phase that decided: decode if served."""
    phase = "decode" if "decode" in phases else phases[0]
    fitting = [v for v in decision.candidates if v.phase == phase and v.eligible]
    own = next((v for v in fitting if v.address == choice.address), None)
    if own is None:
        return "as decided elsewhere"
    named = f"named by {choice.origin}, " if choice.origin else ""
    rank = f"{named}rank {own.rank}{f' ({own.source})' if own.measured else ''}"
    if len(fitting) == 1:
        return f"{rank}, the only one that fits"
    better = sum((v.rank or 0) < (own.rank or 0) for v in fitting)
    place = f"behind {better}" if better else "the best"
    return f"{rank}, {place} of {len(fitting)} that fit"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
