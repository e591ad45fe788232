"""Checks of a backend inside another engine, as the user's settings ask for them."""

from __future__ import annotations

import logging
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from attnmux.core.choosing.decision import Decision
from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.find.settings import Settings

Watch = Callable[[AttentionBackend, Decision, Mapping[int, str]], AttentionBackend]
"""A built backend, its decision and the engine's names of layers by id → the backend that the
engine calls."""


def engine_canary(distribution: str, logger: logging.Logger) -> Watch:
    """A function that wraps an engine's backends if the setting `canary` is set.

    distribution: the integration, whose extra `canary` requires attnmux-testing. logger: gets a
    line for each check. An engine asks for it before it builds anything.

    Raises InvalidInput without attnmux-testing, and SettingsError as `Settings.load` does.
    """
    settings = Settings.load()
    if not settings.canary:
        return lambda backend, decision, names: backend
    names = "RequestCanary", "FailureFolder"
    try:
        canary, folder = (pkgutil.resolve_name(f"attnmux.testing:{name}") for name in names)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("attnmux.testing"):
            raise
        expected = f'attnmux-testing: pip install "{distribution}[canary]"'
        raise InvalidInput(
            settings.where("canary"), got="no attnmux-testing", expected=expected
        ) from None
    path = settings.canary_folder()

    def watch(
        backend: AttentionBackend, decision: Decision, names: Mapping[int, str]
    ) -> AttentionBackend:
        failures: Any = None
        if path is not None:
            failures = folder(path, decision=decision, tensors=settings.canary_values)
        watched: AttentionBackend = canary(
            backend, every=settings.canary, logger=logger, failures=failures, names=names
        )
        return watched

    return watch
