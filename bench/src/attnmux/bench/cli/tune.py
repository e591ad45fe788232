"""`attnmux tune`: backends try out their launches on this machine, and the fastest are kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from attnmux.bench.cli.tune_trying import Tuned, job_for, tried
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.measured.launches import TunedLaunch, launch_file
from attnmux.core.choosing.measured.records import RecordFile
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.choosing.offer.named import offers_named
from attnmux.core.cli.run import Run, common_options, echo_json, pass_run, writing
from attnmux.core.cli.select import machine, requested
from attnmux.core.errors import InvalidInput, NoBackend, SettingsError
from attnmux.core.settings import Settings

OTHERWISE = "name another file as ATTNMUX_LAUNCHES, or --dry-run"
"""Where the file cannot be written."""


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
    plugins = run.plugins(settings)
    here, hypothetical = machine(run, settings, plugins, platform)
    if hypothetical:
        raise InvalidInput("--platform", came=platform, expected="a vendor that is on this machine")
    device = _named_device(device, here)
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
    file = None if dry_run else _opened(settings)
    tuned: list[Tuned] = []
    launches: list[TunedLaunch] = []
    for each in tried(run, jobs):
        if not as_json:
            from attnmux.bench.cli.tune_report import report  # noqa: PLC0415  # rich, off the JSON path

            report(each.offer.address, each.job.platform, each.trials)
        found = each.launches()
        if file is not None and found:
            with writing(file.path, otherwise=OTHERWISE):
                file.add(found)
        tuned.append(each)
        launches += found
    path = None if file is None or not launches else file.path
    if as_json:
        echo_json(_as_json(run, tuned, launches, path))
        return
    faster = "1 launch is" if len(launches) == 1 else f"{len(launches)} launches are"
    kept = "nothing is kept" if path is None else f"kept in {path}"
    click.echo(f"{faster} faster than today's; {kept}")


def tunable(backend: str | None, offers: Sequence[Offer]) -> list[Offer]:
    """Those that `backend` means; all that have a tuner where it is None.

    Raises UnknownBackend, InvalidInput for a backend without a tuner, and NoBackend where there is
    no tuner at all.
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
        raise InvalidInput("backend", came=repr(backend), expected=f"one with a tuner: {names}")
    return meant


def _named_device(device: str, here: Platform) -> str:
    """Whether the machine has one of that number, torch says."""
    kind, colon, number = device.partition(":")
    if device and (kind != here.device_type or bool(colon) != number.isdecimal()):
        expected = f"a device of {here.name or here}: {here.device_type}, {here.device_type}:1, …"
        raise InvalidInput("--device", came=repr(device), expected=expected)
    return device or here.device_type


def _opened(settings: Settings) -> RecordFile[TunedLaunch]:
    """The file for what will be found. `Run.launches` has warned of what in it cannot be read.

    Raises SettingsError where nothing could be kept, or would be used: trying takes minutes.
    """
    path = settings.launches_file()
    if settings.no_launches:
        source = settings.sources.get("no_launches", "")
        raise SettingsError(
            f"no_launches ({source}) forbids to use what is tuned: unset it, or --dry-run"
        )
    if path is None:
        raise SettingsError("there is no home directory: name a file as ATTNMUX_LAUNCHES")
    file = launch_file(path)
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
