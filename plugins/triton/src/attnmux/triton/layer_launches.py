"""How the kernels are launched for one layer."""

from __future__ import annotations

from dataclasses import dataclass, field

from attnmux.triton import serving
from attnmux.triton.launch import Launches
from attnmux.triton.launch_types import ShareLaunch, TileLaunch
from attnmux.triton.serving import Asked


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLaunches:
    """Of all launches those whose kernels serve the layer."""

    asked: Asked
    arch: str
    """As `Platform.arch`."""
    page_size: int
    """Of the pool."""
    launches: Launches = field(default_factory=Launches)

    def tiles(self, *, hides: bool) -> TileLaunch:
        """hides: in steps with a custom mask or items."""
        asked = self.asked
        kernels = serving.serving(serving.TILES, asked, hides=hides)
        return self.launches.tiles(asked.shape, self.arch, self.page_size, kernels, asked.key_bits)

    def shares(self, queries: int, *, hides: bool) -> ShareLaunch:
        """For `queries` new tokens a request."""
        asked = self.asked
        kernels = serving.serving(serving.SHARES, asked, hides=hides)
        return self.launches.shares(
            asked.shape, queries, self.arch, self.page_size, kernels, asked.key_bits
        )
