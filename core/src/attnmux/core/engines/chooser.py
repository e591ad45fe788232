"""A machine's choice of a backend, for an engine that asks for one layer after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from attnmux.core.cards.card import Offer
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.dtype_hint import dtype_hint
from attnmux.core.engines.canary import engine_canary
from attnmux.core.engines.device_platforms import platform_of, reported_device
from attnmux.core.facts.errors import BackendFailed, NoBackend
from attnmux.core.facts.launches import TunedLaunch
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.policy import Policy
from attnmux.core.facts.request import Request
from attnmux.core.find.graphs import with_graphs
from attnmux.core.find.plugins import Plugins
from attnmux.core.find.settings import Settings
from attnmux.core.measured.measurement import Measurement
from attnmux.core.measured.ranking import solve_measured


@dataclass(frozen=True, kw_only=True, slots=True)
class Chooser:
    """The inputs of a choice other than the request: plugins, platform and settings."""

    dtype_hint = staticmethod(dtype_hint)
    platform_of = staticmethod(platform_of)
    reported_device = staticmethod(reported_device)
    canary = staticmethod(engine_canary)
    with_graphs = staticmethod(with_graphs)

    platform: Platform
    offers: tuple[Offer, ...]
    policy: Policy
    measurements: tuple[Measurement, ...]
    launches: tuple[TunedLaunch, ...]
    debug: bool

    @classmethod
    def here(cls, device: torch.device | str) -> Chooser:
        """The chooser of this machine and the user's settings, for tensors on that device or type
        of device. With an index it is the device that names the platform, and torch initialises it.

        Raises InvalidInput if no plugin finds a device of the type, AmbiguousPlatform for
        several, SettingsError for settings that cannot be read.
        """
        settings = Settings.load()
        plugins = Plugins.load(settings=settings)
        return cls(
            platform=platform_of(
                torch.device(device),
                plugins.detect(),
                settings.platform,
                named=settings.where("platform"),
            ),
            offers=tuple(plugins.offers()),
            policy=settings.policy(),
            measurements=Measurement.read(settings.measurements_file()).found,
            launches=TunedLaunch.read(settings.launches_file()).found,
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
