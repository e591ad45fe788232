"""`attnmux audit`: the known faults of kernel libraries, here or on another machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from attnmux.advisories.judging import APPLIES, UNKNOWN, VERDICTS, Judgement, Libraries, judge
from attnmux.core import AttnmuxError, InvalidInput, Platform, Plugins, Settings
from attnmux.core.plugin import installed_version
from attnmux.core.verbs import (
    Run,
    common_options,
    machine,
    plain_console,
    plain_table,
)

FOUND = 1


@click.command()
@click.option("--platform", help=f"A machine, present or not, as {Platform.GRAMMAR}.")
@click.option(
    "--engine",
    metavar="DIST",
    default="",
    help="Judge the calls that an engine, such as vllm, makes itself, not those of attnmux.",
)
@click.option(
    "--library",
    "given",
    multiple=True,
    metavar="DIST==VERSION",
    help="Count this release as installed.",
)
@common_options
def audit(
    run: Run, as_json: bool, platform: str | None, engine: str, given: tuple[str, ...]
) -> int:
    """List known faults of the kernel libraries: those that concern this machine, and why others
    do not.

    A platform that is elsewhere has unknown libraries: `--library` names their releases. Exits with
    0 when no finding applies, 1 when one does or its library's release is not known.
    """
    settings = run.settings()
    plugins = run.plugins(settings)
    findings, offers = plugins.advisories(), plugins.offers()
    if not findings:
        raise AttnmuxError(
            "allow_plugins, deny_plugins or no_plugins leaves attnmux-advisories out"
        )
    _warn_of_unknown(run, settings, [each.id for each in findings])
    devices = _devices(run, settings, plugins, platform)
    libraries = _libraries(given, is_here=all(device.is_here for device in devices))
    if engine and not given and libraries(engine) is None:
        expected = f"an installed engine (pip install {engine}), or --library DIST==VERSION"
        raise InvalidInput("--engine", got=engine, expected=expected)
    judged = [judge(each, devices, libraries, offers, engine=engine) for each in findings]
    judged.sort(key=lambda one: (VERDICTS.index(one.verdict), one.advisory.id))
    if as_json:
        told = [one.to_dict() for one in judged]
        devices_told = [str(device) for device in devices]
        run.echo_json({"devices": devices_told, "findings": told, "warnings": run.warnings})
    else:
        _print(judged, devices)
    return FOUND if any(one.verdict in (APPLIES, UNKNOWN) for one in judged) else 0


def _warn_of_unknown(run: Run, settings: Settings, known: Sequence[str]) -> None:
    for name in settings.ignore_advisories:
        if name not in known:
            where = settings.where("ignore_advisories")
            run.warn(f"{where}: no finding has the id {name!r}")


def _devices(
    run: Run, settings: Settings, plugins: Plugins, wanted: str | None
) -> tuple[Platform, ...]:
    """The platform that is named here or in the settings, else all devices of this machine."""
    if wanted is None and settings.platform is None:
        return tuple(run.detect(plugins).platforms)
    return (machine(run, settings, plugins, wanted),)


def _libraries(given: Sequence[str], *, is_here: bool) -> Libraries:
    """The releases that the user names, else those of this environment, else unknown.

    Raises InvalidInput for text that names no release.
    """
    named: dict[str, str] = {}
    for text in given:
        name, equals, version = text.partition("==")
        try:
            Version(version)
        except InvalidVersion:
            equals = ""
        if not (name and equals):
            raise InvalidInput("--library", got=repr(text), expected="DIST==VERSION")
        named[canonicalize_name(name)] = version
    return _Known(named, is_here=is_here)


class _Known:
    """A distribution's name → its version, "" if unknown, None if it is not installed."""

    def __init__(self, named: Mapping[str, str], *, is_here: bool) -> None:
        self._named, self._is_here = named, is_here

    def __call__(self, distribution: str) -> str | None:
        named = self._named.get(canonicalize_name(distribution))
        if named is not None:
            return named
        return installed_version(distribution) if self._is_here else ""


def _print(judged: Sequence[Judgement], devices: Sequence[Platform]) -> None:
    console = plain_console()
    table = plain_table("finding", "library", "effect", "verdict", "why")
    for one in judged:
        found = one.advisory
        library = f"{found.library} {one.version}".strip()
        table.add_row(found.id, library, found.effect, one.verdict, one.why)
    console.print(table)
    console.print()
    for one in judged:
        if one.verdict in (APPLIES, UNKNOWN):
            whom = f" for {', '.join(one.backends)}" if one.backends else ""
            helps = one.hint or "no release without it is known"
            console.print(
                f"{one.advisory.id}{whom}: {helps}; {one.advisory.source}", soft_wrap=True
            )
    applying = sum(one.verdict == APPLIES for one in judged)
    where = ", ".join(map(str, devices)) or "no device"
    console.print(f"{applying} of {len(judged)} findings apply on {where}", soft_wrap=True)
