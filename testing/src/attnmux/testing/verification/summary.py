"""The file of `attnmux verify --keep`: a summary for `attnmux report`, and a pass."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from attnmux.core import Offer, Settings, SettingsError
from attnmux.core.plugin import Files, Verified
from attnmux.core.verbs import Device, Passes, writing
from attnmux.testing.run.candidate import Candidate
from attnmux.testing.verification.anonymous import anonymous_error
from attnmux.testing.verification.run import Verification

FOLDER = "verified"
"""In the user's cache folder."""
MOST_BYTES = 16_000_000
MOST_FAILURES = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """A run of the suite in numbers, with its failures. It names neither a user nor a machine."""

    backend: str
    """`plugin/name`."""
    date: str
    """The day of the run in UTC, as 2026-11-21."""
    device: Mapping[str, str]
    """The fields of a `Device`."""
    versions: Mapping[str, str]
    """Versions of the plugin and of everything that it ran on, by distribution."""
    complete: bool
    """Whether every case that the card admits ran; otherwise a part or a sample of them did."""
    seed: int
    agreed: Mapping[str, int]
    """Cases by execution: eager, graph."""
    failed: Sequence[Mapping[str, str]]
    """Case, execution and message of at most MOST_FAILURES."""
    failures: int
    refused: int
    """Cases that the card does not admit."""
    sampled: int
    """Cases that ran and that were drawn from the card."""
    pairs: int
    pairs_covered: int
    limits: int
    """Points just beyond the card's limits, all of which the selector must refuse."""
    max_error: float

    @property
    def cases(self) -> int:
        return sum(self.agreed.values())

    def __str__(self) -> str:
        how = "" if self.complete else ", a part of the suite"
        ran = self.cases + self.failures
        if not ran:
            return f"no case ran ({self.date})"
        return f"{self.cases} of {ran} cases agree ({self.date}{how})"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def write(self, file: Path) -> None:
        """Raises SettingsError for a file that cannot be written."""
        with writing(file, otherwise="leave out --keep"):
            file.parent.mkdir(parents=True, exist_ok=True)
            with Files.replacing(file) as stream:
                json.dump(self.to_dict(), stream, indent=1)


def summarised(verification: Verification) -> Summary:
    candidate = verification.candidate
    outcomes = verification.outcomes
    failed = [one for one in (*outcomes, *verification.limits) if one.status == "failed"]
    agreed: Counter[str] = Counter(one.execution for one in outcomes if one.status == "passed")
    return Summary(
        backend=candidate.address,
        date=datetime.now(timezone.utc).date().isoformat(),
        device=asdict(Device.of(candidate.platform)),
        versions=dict(verification.versions),
        complete=verification.is_complete,
        seed=verification.seed,
        agreed=dict(agreed),
        failed=[
            {
                "case": one.case,
                "execution": one.execution,
                "message": anonymous_error(one.message),
            }
            for one in failed[:MOST_FAILURES]
        ],
        failures=len(failed),
        refused=verification.count("refused"),
        sampled=verification.sampled,
        pairs=verification.pairs,
        pairs_covered=verification.pairs_covered,
        limits=len(verification.limits),
        max_error=verification.max_error,
    )


def kept_file(address: str) -> Path:
    """Where the summary of the backend at `address` is kept.

    Raises SettingsError where there is no home directory.
    """
    folder = Settings.cache_folder()
    if folder is None:
        raise SettingsError(
            "there is no home directory to keep a summary in; set XDG_CACHE_HOME to a folder"
        )
    return folder / FOLDER / f"{address.replace('/', '-')}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Keeper:
    """Keeps the summary of a run and, if the whole suite passed, the pass."""

    file: Path
    key: str
    """Key of the pass, with the files that the backend had before the run."""

    @classmethod
    def of(cls, candidate: Candidate, offers: Iterable[Offer]) -> Keeper:
        """Raises SettingsError where there is no home directory."""
        (offer,) = (each for each in offers if each.address == candidate.address)
        key = Passes.key(offer, candidate.platform, candidate.options)
        return cls(file=kept_file(candidate.address), key=key)

    def keep(self, verification: Verification) -> None:
        """A failure takes back an earlier pass. Raises SettingsError for a file that cannot be
        written."""
        summarised(verification).write(self.file)
        store = Passes.in_cache(Settings.cache_folder())
        kept = {name: each for name, each in store.read().items() if name != self.key}
        if verification.has_failed:
            store.write(kept)
        elif verification.is_complete and verification.count("passed"):
            store.write({**kept, self.key: verification.candidate.address})


def read_summary(file: Path) -> Summary | None:
    """The kept summary; None where there is none, or none of this version's fields."""
    try:
        data = json.loads(Files.read(str(file), MOST_BYTES))
        return Summary(**{field.name: data[field.name] for field in fields(Summary)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def verified_by(summary: Summary, candidate: Candidate) -> Verified | None:
    """The entry for `verified_on` of the card; None unless the whole suite ran and agreed."""
    if not summary.complete or summary.failures or not summary.cases:
        return None
    platform = candidate.platform
    named = {"torch", *candidate.card.libraries()}
    return Verified(
        on=platform.name or f"{platform.vendor} {platform.arch}",
        platform=f"{platform.vendor}:{platform.arch}",
        libraries=tuple(
            f"{name} {version}" for name, version in summary.versions.items() if name in named
        ),
        date=summary.date,
        cases=summary.cases,
    )
