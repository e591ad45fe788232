"""What became of an architecture, and what became of all of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["served", "refused", "wrong", "failed", "not built"]
STATUSES: tuple[Status, ...] = ("served", "refused", "wrong", "failed", "not built")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one architecture."""

    config: str
    """Its name: of `Architecture`."""
    status: Status
    """"refused" is a typed error of attnmux, "failed" any other, and "not built" one of
    transformers before attnmux ran."""
    reason: str = ""
    """Why it is refused, what is wrong, or what was raised."""
    backend: str = ""
    worst: float | None = None
    """The largest difference of logits, as a share of their spread."""
    of_bound: float | None = None
    """The difference that comes closest to its bound, as a share of the bound."""
    dims: str = ""
    seconds: float = 0.0


def counts(outcomes: Iterable[Outcome]) -> dict[Status, int]:
    """Architectures by status, all statuses in order."""
    found = Counter(outcome.status for outcome in outcomes)
    return {status: found[status] for status in STATUSES}


def reasons(outcomes: Iterable[Outcome], status: Status) -> list[tuple[str, list[str]]]:
    """(reason, config classes) of those with a status, the most frequent first.

    Reasons that differ only in numbers and in the names of classes are one.
    """
    by_reason: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.status == status:
            by_reason.setdefault(_kind(outcome.reason), []).append(outcome)
    groups = sorted(by_reason.values(), key=len, reverse=True)
    return [(group[0].reason, [each.config for each in group]) for group in groups]


def as_json(outcomes: Sequence[Outcome], facts: dict[str, object]) -> dict[str, object]:
    rows = [asdict(outcome) for outcome in sorted(outcomes, key=lambda each: each.config)]
    return {**facts, "counts": counts(outcomes), "architectures": rows}


def as_markdown(outcomes: Sequence[Outcome], facts: dict[str, object]) -> str:
    """The counts, the architectures that are served, and the reasons of the others."""
    lines = [", ".join(f"{name} {value}" for name, value in facts.items()) + ".", ""]
    lines += ["| outcome | architectures |", "|---|---|"]
    lines += [f"| {status} | {count} |" for status, count in counts(outcomes).items()]
    served = [each for each in outcomes if each.status == "served"]
    if served:
        worst = max(each.worst or 0.0 for each in served)
        names = ", ".join(sorted(map(_name, (each.config for each in served))))
        lines += ["", f"Served, with logits within {worst:.0e} of their spread: {names}.", ""]
    lines += ["| outcome | reason | architectures |", "|---|---|---|"]
    for status in STATUSES[1:]:
        for reason, configs in reasons(outcomes, status):
            text = reason.replace("|", "\\|")[:200]
            lines.append(f"| {status} | {text} | {', '.join(map(_name, configs))} |")
    return "\n".join(lines) + "\n"


def _name(config: str) -> str:
    return config.removesuffix("Config")


def _kind(reason: str) -> str:
    return re.sub(r"\b[A-Z]\w*[a-z]\w*[A-Z]\w*|\d+", "…", reason)
