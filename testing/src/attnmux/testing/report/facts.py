"""The content of a report: facts of the machine, of its packages, and of each backend."""

from __future__ import annotations

import platform as interpreter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from attnmux.core import AttnmuxError, Measurement, Offer, Platform, Plugins, Settings
from attnmux.core.plugin import Verified, installed_version
from attnmux.core.verbs import Device, Proven, standing
from attnmux.testing.run.candidate import Candidate
from attnmux.testing.verification.anonymous import anonymous, anonymous_error
from attnmux.testing.verification.summary import Summary, verified_by

FORMAT = 1
OURS = "attnmux-"
"""Begins the names of this project's distributions, and of most plugins."""
LEFT_OUT = ("pip_packages", "conda_packages", "cpu_info", "caching_allocator_config")
"""Left-out parts of what torch collects: lists of everything that is installed, and settings of
the user."""
UNKNOWN = ("", "N/A", "None", "Could not collect")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """A backend, and its run if there was one."""

    candidate: Candidate
    offer: Offer
    summary: Summary | None

    @property
    def verified(self) -> Verified | None:
        """The entry for `verified_on` of its card, if the whole suite agreed."""
        return None if self.summary is None else verified_by(self.summary, self.candidate)


def reported(
    settings: Settings,
    plugins: Plugins,
    platforms: Sequence[Platform],
    found: Iterable[Reported],
    measurements: Sequence[Measurement],
) -> dict[str, Any]:
    """The report as plain data. It names no user, no host and no folder."""
    return {
        "format": FORMAT,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "platforms": [platform.to_dict() for platform in platforms],
        "system": system(),
        "packages": _packages(plugins),
        "libraries": _libraries(plugins),
        "failures": [
            {"plugin": each.plugin, "stage": each.stage, "error": anonymous_error(each.error)}
            for each in plugins.failures
        ],
        "backends": [_backend(each, settings, measurements) for each in found],
    }


def system() -> Mapping[str, str]:
    """The operating system, the interpreter, and what torch knows of compilers, runtimes and
    drivers."""
    found = {
        "python": interpreter.python_version(),
        "machine": interpreter.machine(),
        "kernel": interpreter.release(),
    }
    try:
        from torch.utils.collect_env import get_env_info  # noqa: PLC0415  # torch, which is slow

        facts = get_env_info()._asdict()  # type: ignore[no-untyped-call]  # torch's own
    except Exception as error:  # it asks many programs, and a report does without
        return {**found, "torch": anonymous_error(AttnmuxError.in_brief(error))}
    for name, value in facts.items():
        if name not in LEFT_OUT and str(value) not in UNKNOWN:
            found[name] = anonymous(str(value))
    return found


def _packages(plugins: Plugins) -> dict[str, str]:
    """This project's distributions and those of other plugins, with their versions."""
    known = {each.name for each in metadata.distributions() if each.name.startswith(OURS)}
    known |= {plugin.distribution for plugin in plugins.loaded}
    return _installed(known)


def _libraries(plugins: Plugins) -> dict[str, str]:
    """The installed libraries that a card requires."""
    needed = {name for offer in plugins.offers() for name in offer.card.libraries()}
    return _installed(needed | {"torch", "triton"})


def _installed(names: Iterable[str]) -> dict[str, str]:
    found = {name: installed_version(name) for name in sorted(names)}
    return {name: version for name, version in found.items() if version is not None}


def _backend(
    each: Reported, settings: Settings, measurements: Sequence[Measurement]
) -> dict[str, Any]:
    candidate, card = each.candidate, each.offer.card
    device = Device.of(candidate.platform)
    own = (m for m in measurements if m.backend == candidate.address and m.device == device)
    reasons = standing(each.offer, settings.policy(), installed_version)
    return {
        "backend": candidate.address,
        "distribution": each.offer.distribution,
        "version": each.offer.version,
        "platform": str(candidate.platform),
        "device": candidate.device,
        "reasons": [str(reason) for reason in reasons],
        "proof": Proven.on(card.verified_on, candidate.platform).word,
        "verified_on": [verified.to_dict() for verified in card.verified_on],
        "verify": None if each.summary is None else asdict(each.summary),
        "verified": None if each.verified is None else each.verified.to_dict(),
        "measurements": [one.to_dict() for one in own],
    }
