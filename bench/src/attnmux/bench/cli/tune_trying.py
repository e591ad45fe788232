"""How `attnmux tune` asks backends to try out their launches."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from attnmux.core.choosing.ask.policy import NAMING, Policy
from attnmux.core.choosing.ask.request import Request
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.measured.launches import (
    Job,
    Trial,
    TunedLaunch,
    Tuner,
    by_subject,
    winner,
)
from attnmux.core.choosing.measured.measurement import versions_of
from attnmux.core.choosing.measured.records import Device
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.solver import solve
from attnmux.core.cli.run import Run
from attnmux.core.errors import AttnmuxError, BackendFailed, NoBackend, in_brief


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What a backend tried."""

    offer: Offer
    job: Job
    trials: tuple[Trial, ...]

    def launches(self) -> list[TunedLaunch]:
        """What to keep."""
        now, versions = datetime.now(timezone.utc), versions_of(self.offer)
        won = [winner(trials) for trials in by_subject(self.trials).values()]
        return [
            TunedLaunch(
                backend=self.offer.address,
                device=Device.of(self.job.platform),
                versions=versions,
                subject=trial.subject,
                values=trial.values,
                median_us=trial.median_us,
                date=now,
            )
            for trial in won
            if trial is not None and trial.median_us is not None
        ]


def job_for(
    offer: Offer,
    request: Request,
    here: Platform,
    offers: Sequence[Offer],
    policy: Policy,
    *,
    device: str,
    launches: tuple[TunedLaunch, ...] = (),
) -> Job:
    """What is decided where the backend is named and no other.

    Raises NoBackend where it does not serve the request, or others serve all phases, as an
    encoder's; else as `solve`.
    """
    named: Mapping[str, Any] = {**dict.fromkeys(NAMING), "backend": offer.address, "origins": {}}
    decision = solve(request, here, offers, replace(policy, **named))
    name = (offer.plugin, offer.card.name)
    chosen = decision.phases.values()
    choice = next((each for each in chosen if (each.plugin, each.backend) == name), None)
    if choice is None:
        phases = ", ".join(decision.phases)
        raise NoBackend(f"{offer.address} is tuned for extend and decode; others serve {phases}")
    request = decision.request.replace(page_size=decision.page_size, kv_dtype=decision.kv_dtype)
    return Job(
        request=request,
        platform=decision.platform,
        device=device,
        options=choice.options,
        launches=launches,
    )


def tried(run: Run, jobs: Sequence[tuple[Offer, Job]]) -> Iterator[Tuned]:
    """One after the other. Who fails is warned of; raises BackendFailed where all do."""
    left = len(jobs)
    for offer, job in jobs:
        try:
            trials = _trials(offer, job)
        except BackendFailed as failure:
            left -= 1
            if not left:
                raise
            run.warn(str(failure))
        else:
            yield Tuned(offer=offer, job=job, trials=trials)


def _trials(offer: Offer, job: Job) -> tuple[Trial, ...]:
    """Raises BackendFailed for a tuner that cannot be imported, or that fails.

    What libraries print goes to stderr: stdout is the answer's.
    """
    from attnmux.bench.cli.tune_report import track  # noqa: PLC0415  # rich, after all is decided

    try:
        with redirect_stdout(sys.stderr):
            tuner: Tuner = pkgutil.resolve_name(offer.card.tuner or "")
            trials = tuple(track(tuner(job), offer.address))
        for trial in trials:
            if not isinstance(trial, Trial):
                raise TypeError(f"it tells {trial!r}, which is no Trial")
    except AttnmuxError:
        raise
    except (Exception, SystemExit) as error:  # whatever a library or a device raises
        raise BackendFailed(offer.address, f"{offer.card.tuner}: {in_brief(error)}") from error
    return trials
