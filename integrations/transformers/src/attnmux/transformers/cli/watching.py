"""What `attnmux generate` takes from attnmux-testing: cases before first use, watched steps."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from attnmux.core import AttentionBackend, Decision, InvalidInput, Measurement, Offer
from attnmux.core.verbs import Run
from attnmux.transformers.cli.options import Watching


def first_use(
    run: Run, offers: Sequence[Offer], measurements: Sequence[Measurement], **place: object
) -> Callable[[Decision], None]:
    """Runs cases on a backend that did not pass here; only warns without attnmux-testing."""
    make = _from_testing("FirstUse")
    if make is None:

        def warn(decision: Decision) -> None:
            run.warn_of_unverified(decision, offers, measurements)

        return warn
    check: Callable[[Decision], None] = make(offers, say=run.warn, **place)
    return check


def _from_testing(name: str) -> Callable[..., Any] | None:
    """A public name of attnmux-testing, which only some need; None without that package."""
    try:
        found: Callable[..., Any] = pkgutil.resolve_name(f"attnmux.testing:{name}")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("attnmux.testing"):
            raise
        return None
    return found


def wrapper(
    run: Run, watching: Watching
) -> Callable[[AttentionBackend, Decision], AttentionBackend] | None:
    """What watches a share of the steps, and keeps those that fail; None without either."""
    if not watching.is_set:
        return None
    make_canary, make_keeper = _from_testing("CanaryBackend"), _from_testing("FailureKeeper")
    if make_canary is None or make_keeper is None:
        got = "no attnmux-testing"
        expected = "pip install attnmux-testing"
        raise InvalidInput("--canary, --keep-failures", got=got, expected=expected)

    def wrap(backend: AttentionBackend, decision: Decision) -> AttentionBackend:
        if watching.canary:
            backend = make_canary(backend, share=watching.canary)
        if watching.keep_failures is not None:
            backend = make_keeper(
                backend,
                watching.keep_failures,
                decision=decision,
                tensors=watching.keep_values,
                on_kept=run.warn,
            )
        return backend

    return wrap
