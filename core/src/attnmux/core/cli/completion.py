"""Completions for a shell: backends, engines and platforms."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click

from attnmux.core.facts.errors import AttnmuxError

Complete = Callable[[click.Context, click.Parameter, str], list[str]]


def completing(known: Callable[[], Iterable[str]]) -> Complete:
    """The `shell_complete` of an option. A configuration that cannot be read completes nothing."""

    def complete(_: click.Context, __: click.Parameter, begun: str) -> list[str]:
        try:
            return sorted(name for name in set(known()) if name.startswith(begun))
        except AttnmuxError:
            return []

    return complete


def _backends() -> Iterable[str]:
    from attnmux.core.find.plugins import Plugins  # noqa: PLC0415  # a shell waits for this alone

    return (offer.card.name for offer in Plugins.load().offers())


def _engines() -> Iterable[str]:
    from attnmux.core.cli.engines import GROUP  # noqa: PLC0415  # as above
    from attnmux.core.facts.libraries import entry_points  # noqa: PLC0415

    return (point.name for point in entry_points(GROUP)[0])


def _platforms() -> Iterable[str]:
    from attnmux.core.facts.vendors import PRODUCTS, VENDORS  # noqa: PLC0415  # as above

    return (*PRODUCTS, *VENDORS)


BACKENDS = completing(_backends)
ENGINES = completing(_engines)
PLATFORMS = completing(_platforms)
