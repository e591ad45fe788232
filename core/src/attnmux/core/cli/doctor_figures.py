"""Files of figures that plugins carry: which are unreadable, and whose figures do not hold here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from attnmux.core.cli.here import READY, Backend
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.libraries import installed_version
from attnmux.core.facts.platform import Platform
from attnmux.core.find.plugin import Plugin
from attnmux.core.measured.shipped import read_once


def unreadable(plugins: Sequence[Plugin]) -> Iterator[str]:
    """A line for each file that choices leave out."""
    for plugin in plugins:
        for each in plugin.figures:
            try:
                read_once(each.file)
            except InvalidInput as error:
                yield (
                    f"figures of {plugin.release} are left out: {error}: "
                    f"pip install --upgrade {plugin.distribution}"
                )


def uncounted(
    plugins: Sequence[Plugin], backends: Sequence[Backend], platform: Platform
) -> Iterator[str]:
    """A line for each file of such a device with figures that do not hold here.

    A backend that cannot run here has a reason of its own in the report.
    """
    offers = {each.offer.address: each.offer for each in backends}
    idle = {each.offer.address for each in backends if each.here != READY}
    for plugin in plugins:
        for each in plugin.figures:
            if not each.hold_on(platform):
                continue
            try:
                sources = read_once(each.file).sources
            except InvalidInput:  # a line of `unreadable`
                continue
            reasons = {
                source.backend: source.shortfall(platform, offers, installed_version)
                for source in sources
                if source.backend not in idle
            }
            if lacking := [f"{address} ({why})" for address, why in reasons.items() if why]:
                yield (
                    f"{Path(each.file).name} of {plugin.release} does not count for "
                    f"{'; '.join(lacking)}: pip install --upgrade {plugin.distribution}, or "
                    "measure here by attnmux bench --keep"
                )
