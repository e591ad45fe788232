"""Prometheus counters of an engine's canary, if prometheus_client is installed."""

from __future__ import annotations

import pkgutil
from functools import cache
from typing import Any

CHECKS = "output", "store"
"""The faults that a check of one request can find."""


class Counts:
    """Counts checks and findings of this process, in the default registry of prometheus_client.

    Without prometheus_client, nothing is counted.
    """

    def __init__(self, checked: Any, found: Any) -> None:  # noqa: ANN401  # Counters, or None
        self._checked, self._found = checked, found

    def check(self) -> None:
        """A step was checked."""
        if self._checked is not None:
            self._checked.inc()

    def finding(self, check: str) -> None:
        """A check found something."""
        if self._found is not None:
            self._found.labels(check).inc()


@cache
def counts() -> Counts:
    """The counters of the process: a registry holds a name once."""
    try:
        counter = pkgutil.resolve_name("prometheus_client:Counter")
    except ImportError:
        return Counts(None, None)
    checked = counter("attnmux_canary_checks", "Steps that attnmux compared with float64.")
    found = counter("attnmux_canary_findings", "Checked steps that differ from float64.", ["check"])
    for check in CHECKS:  # so that a scrape shows 0
        found.labels(check)
    return Counts(checked, found)
