"""Which backend is fastest on each workload, by how much, and which one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnmux.core import Decision
from attnmux.testing.bench.measuring import Row
from attnmux.testing.bench.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Margin:
    """The fastest backend of a workload, compared with the next one and with the chosen one."""

    workload: Workload
    fastest: Row
    second: Row | None
    """None where no other backend was timed."""
    chosen: str | None
    """`plugin/name` of the backend that serves the workload by the decision; None without one."""
    chosen_row: Row | None
    """None where the chosen backend was not timed."""

    @property
    def ratio(self) -> float | None:
        """The next one's time divided by the fastest one's."""
        return None if self.second is None else _ratio(self.second, self.fastest)

    @property
    def noise(self) -> tuple[float, float] | None:
        """The smallest and the largest ratio of any round of the next to any of the fastest."""
        if self.second is None:
            return None
        slow, fast = self.second.rounds_us, self.fastest.rounds_us
        return min(slow) / max(fast), max(slow) / min(fast)

    @property
    def is_clear(self) -> bool:
        """Whether the fastest was faster than the next in every round, or is alone."""
        return self.noise is None or self.noise[0] > 1

    @property
    def cost_of_choice(self) -> float | None:
        """The chosen one's time divided by the fastest one's."""
        return None if self.chosen_row is None else _ratio(self.chosen_row, self.fastest)

    def __str__(self) -> str:
        said = f"fastest: {self.fastest.backend}"
        if self.second is not None and self.noise is not None:
            low, high = self.noise
            verdict = "" if self.is_clear else ", within the noise"
            said += f", {self.ratio:.2f} times as fast as {self.second.backend}"
            said += f" ({low:.2f} to {high:.2f} over the rounds{verdict})"
        if self.chosen is None:
            return said
        if self.cost_of_choice is None:
            return f"{said}; chosen: {self.chosen}, not timed"
        longer = (
            "" if self.chosen_row is self.fastest else f", {self.cost_of_choice:.2f} times as long"
        )
        return f"{said}; chosen: {self.chosen}{longer}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "workload": str(self.workload),
            "fastest": self.fastest.backend,
            "next": self.second and self.second.backend,
            "ratio": self.ratio,
            "noise": self.noise,
            "chosen": self.chosen,
            "cost_of_choice": self.cost_of_choice,
        }


def margins(rows: Sequence[Row], decision: Decision | None) -> tuple[Margin, ...]:
    """A margin for each workload on which a backend was timed."""
    found = []
    for workload in dict.fromkeys(row.workload for row in rows):
        timed = [row for row in rows if row.workload == workload and row.median_us is not None]
        if not timed:
            continue
        fastest, *others = sorted(timed, key=lambda row: row.median_us or 0.0)
        chosen = None if decision is None else server_of(decision, workload)
        found.append(
            Margin(
                workload=workload,
                fastest=fastest,
                second=others[0] if others else None,
                chosen=chosen,
                chosen_row=next((row for row in timed if row.backend == chosen), None),
            )
        )
    return tuple(found)


def server_of(decision: Decision, workload: Workload) -> str:
    """The backend that serves the step, by its batch size where it decodes."""
    if workload.phase == "decode":
        for each in decision.decode_sizes:
            if each.least <= workload.batch_size <= (each.most or workload.batch_size):
                return each.choice.address
    return decision.phases[workload.phase].address


def _ratio(row: Row, to: Row) -> float:
    return (row.median_us or 0.0) / (to.median_us or 1.0)
