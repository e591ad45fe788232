"""A file that keeps the outcomes of a run of the suite, so that an interrupted one can go on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import SystemRandom
from typing import TYPE_CHECKING, Any, Literal

from attnmux.core import InvalidInput, Offer
from attnmux.core.plugin import Files
from attnmux.core.verbs import Passes
from attnmux.testing.run.candidate import Outcome, StepFigures

if TYPE_CHECKING:
    from attnmux.testing.cases.linear import AnyCase
    from attnmux.testing.run.candidate import Candidate

MOST_BYTES = 256_000_000
Execution = Literal["eager", "graph"]


@dataclass(kw_only=True, eq=False)
class KeptRun:
    """The file's first line says what was run, and each other line is a case that passed."""

    path: Path
    subject: str
    """A hash of the backend's card, its files and libraries, the machine and the device."""
    seed: int
    passed: dict[tuple[str, Execution], Outcome] = field(default_factory=dict)
    """Outcomes of an earlier run, by case and execution."""

    @classmethod
    def open(cls, path: Path, candidate: Candidate, distribution: str, seed: int | None) -> KeptRun:
        """The run in the file, or a new one that takes its place where the file holds no run of
        this backend on this machine, in these versions and with this seed.

        seed: None for that of the file, random in a new one. distribution: the plugin's.
        Raises InvalidInput for a file that cannot be read or written.
        """
        card = candidate.card
        offer = Offer(card=card, plugin=candidate.plugin, distribution=distribution)
        subject = Passes.key(
            offer, candidate.platform, candidate.options, repr(card), candidate.device
        )
        try:
            lines = Files.read(str(path), MOST_BYTES).splitlines() if path.exists() else []
            head, *rest = [*_objects(lines)] or [{"subject": "", "seed": None}]
            known, drawn = head["subject"], head["seed"]
            if known != subject or seed not in (None, drawn):
                return cls._new(path, subject, seed)
            outcomes = [_outcome(each) for each in rest]
        except (OSError, ValueError, TypeError, KeyError) as error:
            expected = "a file that `verify --resume` wrote, or none"
            why = error.strerror or error if isinstance(error, OSError) else error
            raise InvalidInput("--resume", got=f"{path}: {why}", expected=expected) from error
        passed = {(each.case, each.execution): each for each in outcomes}
        return cls(path=path, subject=subject, seed=drawn, passed=passed)

    @classmethod
    def _new(cls, path: Path, subject: str, seed: int | None) -> KeptRun:
        seed = SystemRandom().randrange(1 << 31) if seed is None else seed
        path.write_text(json.dumps({"subject": subject, "seed": seed}) + "\n")
        return cls(path=path, subject=subject, seed=seed)

    def has(self, case: AnyCase) -> bool:
        """Whether the case passed in the earlier run."""
        return (case.name, case.execution) in self.passed

    def keeping(self, outcomes: Iterable[Outcome]) -> Iterator[Outcome]:
        """The outcomes, each of which is in the file before it is yielded if it passed."""
        with open(self.path, "a", encoding="utf-8") as file:
            for outcome in outcomes:
                if outcome.status == "passed":
                    file.write(json.dumps(outcome.to_dict()) + "\n")
                    file.flush()
                yield outcome


def _objects(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """The objects of a file whose last line may be cut off. Raises ValueError for other content."""
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            if line is lines[-1] and line is not lines[0]:
                return
            raise
        if not isinstance(found, dict):
            raise ValueError(f"a line is {line[:40]!r}")
        yield found


def _outcome(found: dict[str, Any]) -> Outcome:
    steps = tuple(StepFigures(**step) for step in found["steps"])
    return Outcome(
        case=found["case"],
        execution=found["execution"],
        status="passed",
        max_error=found["max_error"],
        steps=steps,
    )
