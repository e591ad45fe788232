"""What attnmux-nvidia offers: the probe of NVIDIA devices through NVML. No backend yet."""

from __future__ import annotations

from attnmux.core.choosing.card import BackendCard
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.plugins import hookimpl
from attnmux.nvidia.probe import probe


@hookimpl
def attnmux_platforms() -> list[Platform]:
    return probe()


@hookimpl
def attnmux_cards() -> list[BackendCard]:
    return []
