"""Errors of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from attnmux.core import RankError


class RanksDiffer(RankError):
    """Ranks that should run the same and do not. Every rank raises it, before anything runs."""

    is_on_every_rank = True

    def __init__(self, what: str, *, by_rank: Sequence[str], hint: str = "") -> None:
        self.what = what
        self.by_rank = tuple(by_rank)
        ranks: dict[str, list[int]] = {}
        for rank, said in enumerate(by_rank):
            ranks.setdefault(said, []).append(rank)
        listed = "; ".join(
            f"rank{'s' * (len(those) > 1)} {', '.join(map(str, those))}: {said}"
            for said, those in ranks.items()
        )
        hint = f"; {hint}" if hint else ""
        super().__init__(f"{what}: expected the same on every rank, got {listed}{hint}")


class RankFailed(RankError):
    """A collective that the other ranks did not complete: one ended, or did not arrive in time."""

    def __init__(self, what: str, *, reason: str, seconds: float) -> None:
        self.what = what
        self.reason = reason
        self.seconds = seconds
        super().__init__(
            f"{what}: another rank ended or did not arrive within {seconds:g} s ({reason}); "
            "its own output says why. Start all ranks again"
        )
