"""The offers of attnmux-ascend, as data: the probe of Ascend devices, and its backends.

Each card has its own module, `cards/<backend>.py`. Importing this module imports no torch.
"""

from __future__ import annotations

from attnmux.ascend.cards import CARDS
from attnmux.core import Platform, Settings
from attnmux.core.plugin import BackendCard, hookimpl


@hookimpl
def attnmux_platforms() -> list[Platform]:
    from attnmux.ascend.probe import probe  # noqa: PLC0415  # in the child that asks for devices

    return probe(variables=Settings.device_variables())


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return [*CARDS]
