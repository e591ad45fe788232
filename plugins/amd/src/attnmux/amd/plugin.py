"""The offers of attnmux-amd, as data: the probe of AMD devices, and its backends.

Each card has its own module, `cards/<backend>.py`. Importing this module imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmux.core import Platform, Settings
from attnmux.core.plugin import hookimpl

if TYPE_CHECKING:
    from attnmux.core.plugin import BackendCard


@hookimpl
def attnmux_platforms() -> list[Platform]:
    from attnmux.amd.probe import probe  # noqa: PLC0415  # in the child that asks for devices

    return probe(variables=Settings.device_variables())


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    from attnmux.amd.cards import CARDS  # noqa: PLC0415  # not in the child

    return [*CARDS]
