"""What a trial came to. Importing this module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from attnmux.core.choosing.common.verdict import Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one case."""

    case: str
    execution: Literal["eager", "graph"] = "eager"
    """How its steps are run."""
    status: Literal["passed", "failed", "refused"]
    """Refused: the card does not admit the case, and the selector said so with reasons."""
    max_error: float = 0.0
    """The largest absolute difference from the reference in output and LSE."""
    message: str = ""
    """What went wrong and where."""
    reasons: tuple[Reason, ...] = ()
    error: Exception | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "execution": self.execution,
            "status": self.status,
            "max_error": self.max_error,
            "message": self.message,
            "reasons": [str(reason) for reason in self.reasons],
        }
