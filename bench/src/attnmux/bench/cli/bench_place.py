"""Where `attnmux bench` times, and who may take part."""

from __future__ import annotations

from dataclasses import dataclass

from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.choosing.measured.launches import TunedLaunch
from attnmux.core.choosing.offer.card import Offer
from attnmux.core.cli.run import Run
from attnmux.core.cli.select import machine
from attnmux.core.errors import InvalidInput
from attnmux.core.settings import Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A device of this machine, and what the plugins offer."""

    platform: Platform
    device: str
    """torch's word."""
    offers: tuple[Offer, ...]
    launches: tuple[TunedLaunch, ...] = ()
    """Everything that was tuned on this machine."""

    def __str__(self) -> str:
        return self.platform.name or str(self.platform)


def find_place(run: Run, settings: Settings, platform: str | None, device: str) -> Place:
    """Raises InvalidInput for a machine that is not here, and for another platform's device."""
    plugins = run.plugins(settings)
    here, hypothetical = machine(run, settings, plugins, platform)
    if hypothetical:
        raise InvalidInput("--platform", came=platform, expected="a vendor that is on this machine")
    if device and device.partition(":")[0] != here.device_type:
        expected = f"{here.device_type}, as torch calls {here}, or {here.device_type}:NUMBER"
        raise InvalidInput("--device", came=repr(device), expected=expected)
    return Place(
        platform=here,
        device=device or here.device_type,
        offers=plugins.offers(),
        launches=run.launches(settings),
    )
