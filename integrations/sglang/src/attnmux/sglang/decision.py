"""The choice of a backend inside SGLang: the plugins, the platform and the settings, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attnmux.core import (
    BackendFailed,
    Decision,
    InvalidInput,
    Measurement,
    NoBackend,
    Offer,
    Platform,
    Policy,
    Request,
    Settings,
    TunedLaunch,
    detect,
    launch_file,
    load_plugins,
    pick_platform,
    read_measurements,
    solve_measured,
)

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Chooser:
    """Everything that a choice depends on, besides the request."""

    platform: Platform
    offers: tuple[Offer, ...]
    policy: Policy
    measurements: tuple[Measurement, ...]
    launches: tuple[TunedLaunch, ...]
    debug: bool

    @classmethod
    def here(cls, device_type: str) -> Chooser:
        """Of this machine and the user's settings, for tensors on that type of device.

        Raises InvalidInput where no plugin finds a device of the type, AmbiguousPlatform for
        several, SettingsError for settings that cannot be read.
        """
        settings = Settings.load()
        plugins = load_plugins(settings=settings)
        found = detect(plugins)
        alike = tuple(each for each in found.platforms if each.device_type == device_type)
        if not alike:
            present = ", ".join(sorted({each.device_type for each in found.platforms}))
            raise InvalidInput("device", got=device_type, expected=f"one of {present}")
        return cls(
            platform=pick_platform(replace(found, platforms=alike), settings.platform),
            offers=tuple(plugins.offers()),
            policy=settings.policy(),
            measurements=_measurements(settings.measurements_file()),
            launches=_launches(settings.launches_file()),
            debug=settings.debug,
        )

    def decide(
        self, request: Request, failed: Mapping[str, BackendFailed] | None = None
    ) -> Decision:
        """Raises NoBackend and UnknownBackend as `solve` does."""
        policy = self.policy if failed is None else replace(self.policy, failed=failed)
        return solve_measured(
            request, self.platform, self.offers, policy, measurements=self.measurements
        )

    def decide_with_graphs(
        self, request: Request, failed: Mapping[str, BackendFailed] | None = None
    ) -> Decision:
        """For decode steps in device graphs, else for eager ones.

        Raises as `decide`.
        """
        try:
            return self.decide(request.replace(origin="model", graph=True), failed)
        except NoBackend:
            return self.decide(request, failed)


def _measurements(file: Path | None) -> tuple[Measurement, ...]:
    return read_measurements(file).found if file is not None and file.exists() else ()


def _launches(file: Path | None) -> tuple[TunedLaunch, ...]:
    return launch_file(file).read().found if file is not None and file.exists() else ()
