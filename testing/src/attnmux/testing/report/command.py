"""`attnmux report`: one file about a machine and its backends, for the authors of their cards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import click

from attnmux.core import Measurement, NoBackend, Offer, Plugins, Settings
from attnmux.core.plugin import Files
from attnmux.core.verbs import Device, FiniteRange, Run, common_options, writing
from attnmux.testing.report.facts import Reported, reported
from attnmux.testing.run.candidate import Candidate, find_candidate
from attnmux.testing.verification.run import QUICK, verify_quickly
from attnmux.testing.verification.summary import Summary, kept_file, read_summary, summarised

DEFAULT = Path("attnmux-report.json")
TIMEOUT = 300.0
"""Seconds after which a case has failed."""


@click.command()
@click.argument("backends", nargs=-1, metavar="[BACKEND]...")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=DEFAULT,
    show_default=True,
    help="The file to write; an existing one is replaced.",
)
@click.option("--device", default="", help="torch's name: cpu, cuda:1, … [default: by the card]")
@click.option("--no-verify", is_flag=True, help="Run nothing: report only kept results.")
@click.option(
    "--budget",
    type=FiniteRange(min=0, min_open=True),
    default=QUICK,
    show_default=True,
    help="Seconds for the cases of one backend that has no kept run.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Child processes that run cases.",
)
@common_options
def report(
    run: Run,
    backends: tuple[str, ...],
    out: Path,
    device: str,
    no_verify: bool,
    budget: float,
    jobs: int,
    as_json: bool,
) -> int:
    """Write a file about this machine and each BACKEND, for those who maintain its card.

    It has the devices, versions of packages, libraries, runtimes and drivers, the kept results of
    `verify --keep` and `bench --keep`, and for a backend without a kept run, sampled cases that run
    now. It names no user, no host and no folder. Without names, every backend with kept results is
    in it, and nothing runs. Exits with 0 when the file is written.
    """
    settings = run.settings()
    plugins: Plugins = run.plugins(settings)
    platforms = run.detect(plugins).platforms
    measurements = run.measurements(settings)
    names = backends or tuple(_with_results(plugins.offers(), measurements))
    launches = run.launches(settings)
    candidates = [
        find_candidate(name, device=device, plugins=plugins, platforms=platforms, launches=launches)
        for name in dict.fromkeys(names)
    ]
    runs_now = bool(backends) and not no_verify
    if runs_now and find_spec("torch") is None:
        raise NoBackend(
            "report runs the backends, which needs torch: pip install 'attnmux-core[torch]', or "
            "--no-verify"
        )
    _check_writable(out)
    offers = {offer.address: offer for offer in plugins.offers()}
    found = []
    for candidate in candidates:
        offer = offers[candidate.address]
        summary = _kept(run, candidate, offer)
        if summary is None and runs_now:
            found.append(_run_now(candidate, offer, budget, jobs))
        else:
            found.append(Reported(candidate=candidate, offer=offer, summary=summary))
    data = reported(settings, plugins, platforms, found, measurements)
    with writing(out, otherwise="name another file as --out"), Files.replacing(out) as stream:
        json.dump(data, stream, indent=1)
        stream.write("\n")
    if as_json:
        run.echo_json({"file": str(out), "report": data, "warnings": run.warnings})
    else:
        _say(out, found)
    return 0


def _with_results(offers: Sequence[Offer], measurements: Sequence[Measurement]) -> Iterator[str]:
    """The addresses of backends with a kept run or a measurement."""
    measured = {each.backend for each in measurements}
    for offer in offers:
        file = kept_file(offer.address) if Settings.cache_folder() else None
        if offer.address in measured or (file is not None and file.exists()):
            yield offer.address


def _check_writable(out: Path) -> None:
    """Raise before minutes of running."""
    Files.check_replaceable("--out", out)
    probe = out.with_name(f".{out.name}.probe")
    with writing(out, otherwise="name another file as --out"):
        probe.touch()
        probe.unlink()


def _kept(run: Run, candidate: Candidate, offer: Offer) -> Summary | None:
    """The kept run, if it was on this device with the versions that are installed."""
    if Settings.cache_folder() is None:
        return None
    summary = read_summary(kept_file(candidate.address))
    if summary is None:
        return None
    same = all(summary.versions.get(name) == each for name, each in offer.versions().items())
    if same and summary.device == asdict(Device.of(candidate.platform)):
        return summary
    run.warn(
        f"the kept run of {candidate.address} ({summary.date}) was on another device or with "
        f"other versions and is left out: attnmux verify {candidate.address} --keep"
    )
    return None


def _run_now(candidate: Candidate, offer: Offer, budget: float, jobs: int) -> Reported:
    click.echo(f"running cases on {candidate.address} for {budget:g} s", err=True)
    verification = verify_quickly(
        candidate, offer.distribution, budget=budget, jobs=jobs, timeout=TIMEOUT
    )
    return Reported(candidate=candidate, offer=offer, summary=summarised(verification))


def _say(out: Path, found: Sequence[Reported]) -> None:
    named = "1 backend" if len(found) == 1 else f"{len(found)} backends"
    click.echo(f"wrote {out}: this machine and {named}")
    for each in found:
        click.echo(
            f"  {each.candidate.address}: {each.summary or 'no kept run, and none was made'}"
        )
        for line in _next_steps(each):
            click.echo(f"    {line}")
    click.echo(
        "Read the file, then attach it to an issue or a change of the package that has the card. "
        "docs/bring-up.md says how the card takes it."
    )


def _next_steps(each: Reported) -> Iterator[str]:
    address, summary = each.candidate.address, each.summary
    if each.verified is not None:
        yield "for verified_on of its card:"
        yield repr(each.verified)
    elif summary is not None and summary.failures:
        yield f"{summary.failures} failed: the file has their messages, the seed is {summary.seed}"
    elif summary is not None and not summary.cases:
        yield "its card admits no case here, or a library is missing: attnmux doctor"
    else:
        yield f"for verified_on of its card: attnmux verify {address} --keep, then report again"
