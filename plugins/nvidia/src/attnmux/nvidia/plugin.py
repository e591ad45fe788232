"""The hooks of attnmux-nvidia: NVIDIA devices as NVML reports them, and the cards of the backends.

Each card is data in a module of its own, `cards/<backend>.py`. Importing this module imports
neither torch nor a kernel library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmux.core import Platform, Settings
from attnmux.core.plugin import hookimpl

if TYPE_CHECKING:
    from attnmux.core.plugin import BackendCard


@hookimpl
def attnmux_platforms() -> list[Platform]:
    from attnmux.nvidia.probe import probe  # noqa: PLC0415  # in the child that asks for devices

    return probe(variables=Settings.device_variables())


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    from attnmux.nvidia.cards import CARDS  # noqa: PLC0415  # not in the child

    return [*CARDS]
