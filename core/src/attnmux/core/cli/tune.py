"""`attnmux tune`: backends try out their launches on this machine, and the fastest are kept."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from attnmux.core.choosing.card import Offer
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.launches import TunedLaunch, launch_file
from attnmux.core.choosing.measurement import Device, versions_of
from attnmux.core.choosing.naming import offers_named
from attnmux.core.choosing.solver import solve
from attnmux.core.choosing.trials import Job, Trial, Tuner, by_subject, winner
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.core.cli.select import machine, requested
from attnmux.core.errors import (
    AttnmuxError,
    BackendFailed,
    InvalidInput,
    NoBackend,
    SettingsError,
    in_brief,
)

PHASES_UNNAMED = dict.fromkeys(("prefill_backend", "decode_backend", "mm_backend"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What a backend tried."""

    offer: Offer
    job: Job
    trials: tuple[Trial, ...]

    def won(self) -> list[Trial]:
        found = (winner(trials) for trials in by_subject(self.trials).values())
        return [trial for trial in found if trial is not None]

    def launches(self) -> list[TunedLaunch]:
        """What to keep."""
        now, versions = datetime.now(timezone.utc), versions_of(self.offer)
        return [
            TunedLaunch(
                backend=self.offer.address,
                device=Device.of(self.job.platform),
                versions=versions,
                subject=trial.subject,
                values=trial.values,
                median_us=trial.median_us or 0.0,
                date=now,
            )
            for trial in self.won()
        ]


@click.command()
@click.argument("backend", required=False)
@click.option("--request", "fields", default="", help="FIELD=VALUE,…: head_dim=128,page_size=16")
@click.option("--model", help="A folder with a Hugging Face config.json.")
@click.option("--tp", type=click.IntRange(min=1), default=1, help="Ranks that share the heads.")
@click.option("--platform", help="A vendor, where several are here.")
@click.option("--device", default="", help="torch's word: cuda:1, … [default: the first]")
@click.option("--dry-run", is_flag=True, help="Try, and keep nothing.")
@common_options
@pass_run
def tune(
    run: Run,
    as_json: bool,
    backend: str | None,
    fields: str,
    model: str | None,
    tp: int,
    platform: str | None,
    device: str,
    dry_run: bool,
) -> None:
    """Let BACKEND, or all that can, try out how they launch their kernels for a request's shapes.

    What is faster than today's launch by more than 2 % is kept for this device and these versions,
    and used whenever the backend is built. Exits with 0 when tried, 3 when nothing fits.
    """
    request = requested(model, fields, tp, None)
    settings = run.settings()
    path = settings.launches_file()
    if path is None and not dry_run:
        source = settings.sources.get("no_launches", "")
        raise SettingsError(
            f"no_launches ({source}) forbids to use what is tuned: unset it, or --dry-run"
        )
    plugins = run.plugins(settings)
    here, hypothetical = machine(run, settings, plugins, platform)
    if hypothetical:
        raise InvalidInput("--platform", came=platform, expected="a vendor that is on this machine")
    policy = settings.policy()
    jobs = []
    for offer in tunable(backend, plugins.offers()):
        try:
            named = replace(
                policy, backend=offer.address, prefill_backend=None, decode_backend=None
            )
            jobs.append((offer, _job(solve(request, here, plugins.offers(), named), device)))
        except NoBackend as refusal:
            if backend is not None:
                raise
            run.warn(f"{offer.address} is not tuned: {str(refusal).partition(chr(10))[0]}")
    if not jobs:
        raise NoBackend(f"no backend that can be tuned serves this on {here.name or here}")
    tuned = [Tuned(offer=offer, job=job, trials=_tried(offer, job)) for offer, job in jobs]
    launches = [launch for each in tuned for launch in each.launches()]
    if launches and path is not None and not dry_run:
        launch_file(path).add(launches)
    if as_json:
        echo_json(_as_json(run, tuned, launches, None if dry_run else path))
        return
    from attnmux.core.cli.tune_report import report  # noqa: PLC0415  # rich, off the JSON path

    report([(each.offer.address, str(each.job.platform), each.trials) for each in tuned])
    kept = "nothing is kept" if dry_run or not launches else f"kept in {path}"
    click.echo(f"{len(launches)} launches are faster than today's; {kept}")


def tunable(backend: str | None, offers: Sequence[Offer]) -> list[Offer]:
    """Those that `backend` means; all that have a tuner where it is None.

    Raises UnknownBackend, and InvalidInput for a backend without a tuner.
    """
    having = [offer for offer in offers if offer.card.tuner is not None]
    if backend is None:
        return having
    meant = [offer for offer in offers_named(backend, offers) if offer in having]
    if not meant:
        names = ", ".join(offer.address for offer in having) or "none is installed"
        raise InvalidInput("backend", came=repr(backend), expected=f"one with a tuner: {names}")
    return meant


def _job(decision: Decision, device: str) -> Job:
    """All phases have the one backend that was named."""
    choice = next(iter(decision.phases.values()))
    request = decision.request.replace(page_size=decision.page_size, kv_dtype=decision.kv_dtype)
    return Job(
        request=request,
        platform=decision.platform,
        device=device or decision.platform.device_type,
        options=choice.options,
    )


def _tried(offer: Offer, job: Job) -> tuple[Trial, ...]:
    """Raises BackendFailed for a tuner that cannot be imported, or that fails."""
    from attnmux.core.cli.tune_report import track  # noqa: PLC0415  # rich, after all is decided

    try:
        tuner: Tuner = pkgutil.resolve_name(offer.card.tuner or "")
        return tuple(track(tuner(job), offer.address))
    except AttnmuxError:
        raise
    except Exception as error:  # whatever a library or a device raises
        raise BackendFailed(offer.address, f"{offer.card.tuner}: {in_brief(error)}") from error


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
        "file": None if path is None or not launches else str(path),
        "warnings": run.warnings,
    }
