"""`attnmux tune`: lets backends try kernel launches on this machine, and keeps the fastest."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from attnmux.core import (
    AttnmuxError,
    BackendFailed,
    InvalidInput,
    NoBackend,
    Offer,
    Platform,
    Policy,
    Request,
    Settings,
    SettingsError,
    TunedLaunch,
    solve,
)
from attnmux.core.plugin import Job, Trial
from attnmux.core.verbs import (
    Device,
    Run,
    common_options,
    machine,
    offers_named,
    writing,
)
from attnmux.testing.bench.cli.asked import asked_of_one_shape, other_device
from attnmux.testing.bench.keeping import RecordFile
from attnmux.testing.bench.ranks import joined, shared_launches, shared_trials, together_on
from attnmux.testing.bench.trials import by_subject, winner

if TYPE_CHECKING:
    from attnmux.distributed import RankGroup

OTHERWISE = "name another file as ATTNMUX_LAUNCHES, or --dry-run"
"""Advice for a file that cannot be written."""


@click.command()
@click.argument("backend", required=False)
@click.option(
    "--request",
    "fields",
    multiple=True,
    help="FIELD=VALUE,…: head_dim=128,page_size=16; repeatable.",
)
@click.option("--model", help="A folder with a Hugging Face config.json.")
@click.option("--assume", is_flag=True, help="Read an unknown model_type as causal attention.")
@click.option("--tp", type=click.IntRange(min=1), default=1, help="Ranks that share the heads.")
@click.option("--platform", help="A vendor, if the machine has devices of several.")
@click.option("--device", default="", help="A torch device, as in cuda:1. [default: the first]")
@click.option("--dry-run", is_flag=True, help="Try launches, and keep nothing.")
@common_options
def tune(
    run: Run,
    as_json: bool,
    backend: str | None,
    fields: tuple[str, ...],
    model: str | None,
    assume: bool,
    tp: int,
    platform: str | None,
    device: str,
    dry_run: bool,
) -> None:
    """Let BACKEND, or every backend that can, try kernel launches for a request's shapes.

    A launch that beats today's by more than 2 % is kept for this device and these versions, and
    used whenever the backend is built. Processes that torchrun started try them at the same time,
    each on a device of its own, and a time is that of the slowest. Exits with 0 when launches were
    tried, 3 when no backend fits.
    """
    request = asked_of_one_shape(model, fields, tp, assume=run.warn if assume else None)
    settings = run.settings()
    plugins = run.plugins(settings)
    here = machine(run, settings, plugins, platform, elsewhere=False, device=device)
    if not here.is_here:
        raise InvalidInput("--platform", got=platform, expected="a vendor that is on this machine")
    named = device
    device = _check_device(device, here)
    offers, policy, known = plugins.offers(), settings.policy(), run.launches(settings)
    jobs = []
    for offer in tunable(backend, offers):
        try:
            job = job_for(offer, request, here, offers, policy, device=device, launches=known)
            jobs.append((offer, job))
        except NoBackend as refusal:
            if backend is not None:
                raise
            run.warn(f"{offer.address} is not tuned: {str(refusal).partition(chr(10))[0]}")
    if not jobs:
        where = here.name or here
        raise NoBackend(f"no backend that can be tuned serves this on {where}; name one to see why")
    ranks = _joined(here, named)
    if ranks is not None:
        jobs = _shared(ranks, jobs, offers)
    tells = ranks is None or ranks.rank == 0
    file = _open(settings) if tells and not dry_run else None
    tuned = []
    for each in try_launches(run, jobs, ranks):
        if tells and not as_json:
            from attnmux.testing.bench.cli.tables import print_trials  # noqa: PLC0415  # rich, off the JSON path

            print_trials(each.offer.address, each.job.platform, each.trials)
        found = each.launches()
        _add(found, file)
        tuned.append((each, found))
    if tells:
        _tell(run, tuned, None if file is None else file.path, as_json=as_json)


def _add(launches: Sequence[TunedLaunch], file: RecordFile[TunedLaunch] | None) -> None:
    if file is not None and launches:
        with writing(file.path, otherwise=OTHERWISE):
            file.add(launches)


def _tell(
    run: Run,
    tuned: Sequence[tuple[Tuned, Sequence[TunedLaunch]]],
    path: Path | None,
    *,
    as_json: bool,
) -> None:
    launches = [launch for _, found in tuned for launch in found]
    path = path if launches else None
    if as_json:
        run.echo_json(_as_json(run, [each for each, _ in tuned], launches, path))
        return
    faster = "1 launch is" if len(launches) == 1 else f"{len(launches)} launches are"
    kept = "nothing is kept" if path is None else f"kept in {path}"
    click.echo(f"{faster} faster than today's; {kept}")


def tunable(backend: str | None, offers: Sequence[Offer]) -> list[Offer]:
    """The offers that `backend` names; all with a tuner where it is None.

    Raises UnknownBackend, InvalidInput for a backend without a tuner, and NoBackend where no
    backend has one.
    """
    having = [offer for offer in offers if offer.card.tuner is not None]
    if backend is None:
        if not having:
            raise NoBackend(
                "no installed backend has a tuner; `attnmux backends` lists what is installed"
            )
        return having
    meant = [offer for offer in offers_named(backend, offers) if offer in having]
    if not meant:
        names = ", ".join(offer.address for offer in having) or "none is installed"
        raise InvalidInput("backend", got=repr(backend), expected=f"one with a tuner: {names}")
    return meant


def _check_device(device: str, here: Platform) -> str:
    """The device's name, the platform's first by default. torch checks its number later."""
    kind, colon, number = device.partition(":")
    if device and (kind != here.device_type or bool(colon) != number.isdecimal()):
        raise other_device(device, here)
    return device or here.device_type


def _joined(here: Platform, device: str) -> RankGroup | None:
    """The ranks that a launcher started, as `joined` returns them; None without torch."""
    try:
        return joined(here.device_type, device)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return None  # the tuner reports it


def _shared(
    ranks: RankGroup, jobs: Sequence[tuple[Offer, Job]], offers: Sequence[Offer]
) -> list[tuple[Offer, Job]]:
    """The jobs on this rank's device, which start from the launches of rank 0. Raises RanksDiffer
    where the ranks have other plugins or libraries."""
    known, device = shared_launches(ranks, offers, jobs[0][1].launches), str(ranks.device)
    together = together_on(ranks)
    return [
        (offer, replace(job, device=device, launches=known, together=together))
        for offer, job in jobs
    ]


def _open(settings: Settings) -> RecordFile[TunedLaunch]:
    """Open the file of launches. `Run.launches` has warned of records that cannot be read.

    Raises SettingsError, before minutes of trying, where launches cannot be kept or are not used.
    """
    path = settings.launches_file()
    if settings.no_launches:
        source = settings.sources.get("no_launches", "")
        raise SettingsError(
            f"no_launches ({source}) forbids tuned launches: unset it, or --dry-run"
        )
    if path is None:
        raise SettingsError("there is no home directory: name a file as ATTNMUX_LAUNCHES")
    file = RecordFile(path, TunedLaunch)
    with writing(path, otherwise=OTHERWISE):
        file.prepare()
    return file


def _as_json(
    run: Run, tuned: Sequence[Tuned], launches: Sequence[TunedLaunch], path: Path | None
) -> dict[str, Any]:
    return {
        "backends": [
            {
                "backend": each.offer.address,
                "platform": each.job.platform.to_dict(),
                "device": each.job.device,
                "request": each.job.request.to_dict(),
                "trials": [trial.to_dict() for trial in each.trials],
            }
            for each in tuned
        ],
        "launches": [launch.to_dict() for launch in launches],
        "file": None if path is None else str(path),
        "warnings": run.warnings,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The launches that a backend tried."""

    offer: Offer
    job: Job
    trials: tuple[Trial, ...]

    def launches(self) -> list[TunedLaunch]:
        """The launches to keep: the winner of each subject."""
        now, versions = datetime.now(timezone.utc), self.offer.versions()
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
    """The job of a decision in which this backend alone is named.

    Raises NoBackend where it does not serve the request, or where others serve all of the phases,
    as an encoder's; otherwise like `solve`.
    """
    named: Mapping[str, Any] = {
        **dict.fromkeys(Policy.NAMING),
        "backend": offer.address,
        "origins": {},
    }
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


def try_launches(
    run: Run, jobs: Sequence[tuple[Offer, Job]], ranks: RankGroup | None = None
) -> Iterator[Tuned]:
    """Run the jobs in order, with a warning for each that fails. Raises BackendFailed if all do.

    ranks: those that run the same jobs at the same time, and share the times of the slowest.
    """
    left = len(jobs)
    for offer, job in jobs:
        try:
            trials = _trials(offer, job)
            if ranks is not None:
                trials = shared_trials(ranks, offer.address, trials)
        except BackendFailed as failure:
            left -= 1
            if not left:
                raise
            run.warn(str(failure))
        else:
            yield Tuned(offer=offer, job=job, trials=trials)


def _trials(offer: Offer, job: Job) -> tuple[Trial, ...]:
    """Raises BackendFailed for a tuner that cannot be imported, or that fails.

    Redirects what libraries print to stderr: stdout is for the answer.
    """
    from attnmux.testing.bench.cli.progress import Bar  # noqa: PLC0415  # rich, off the path of refusals

    try:
        with redirect_stdout(sys.stderr):
            tuner: Callable[[Job], Iterator[Trial]] = pkgutil.resolve_name(offer.card.tuner or "")
            trials = tuple(Bar().track(tuner(job), f"{offer.address} tries"))
        for trial in trials:
            if not isinstance(trial, Trial):
                raise TypeError(f"it yields {trial!r}, which is no Trial")
    except AttnmuxError:
        raise
    except (Exception, SystemExit) as error:  # whatever a library or a device raises
        raise BackendFailed(
            offer.address, f"{offer.card.tuner}: {AttnmuxError.in_brief(error)}"
        ) from error
    return trials
