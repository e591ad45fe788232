"""Which attention kernel serves a layer, and how it is launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pkgutil import resolve_name
from typing import Any, Literal

import torch
import triton
from packaging.specifiers import SpecifierSet

from attnmux.core import LayerSpec
from attnmux.triton.launches.config_tables import ConfigTables
from attnmux.triton.launches.configs import (
    HOPPER,
    HOPPER_LATENT,
    PORTABLE,
    C,
    ConfigQuery,
    ShareConfig,
    TileConfig,
)
from attnmux.triton.launches.operands import Keys, has_whole_rows
from attnmux.triton.launches.shapes import Shape
from attnmux.triton.plugin import HOPPER_RELEASES

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
SHARE_DIMS = ((64, 64), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256))
"""Columns of K and V for which the kernel for shares on Hopper has a configuration."""
TILE_DIMS = (64, 128, 256)
"""The largest power of 2 in the columns of K, for the kernel for tiles on Hopper. The rest, a
multiple of 16, is computed apart; V has as many columns as K, or only the power of 2."""
LATENT_DIMS = (512, 64)
NARROW_V = 32
"""The ptxas of Triton 3.6.0 miscompiles the portable kernels for SM90 if V has 8 bits and a tile
of at most this many columns: results are wrong on an H200, and right with `--opt-level 0`."""
LEAST_WARPGROUP_ROWS = 64
"""Triton multiplies tiles with fewer rows warp by warp, which is compiled correctly."""


Rounding = Literal["none", "queries", "all"]
"""Nothing, Q, or Q and the softmax's weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTraits:
    """The facts about a layer that decide which kernels serve it; no step changes them."""

    layer: LayerSpec
    shape: Shape
    dtype: torch.dtype | None
    """Q's dtype; None if the request does not name one."""
    keys: Keys | None
    """The pool's memory, for a layer that the pool stores."""
    page_size: int
    """The page size of the table of slots."""
    rounds: Rounding = "none"
    """What is rounded to the 8 bits of K and V, in tiles over these."""

    @property
    def key_dtype(self) -> torch.dtype | None:
        return self.dtype if self.keys is None else self.keys.k.dtype

    @property
    def key_bits(self) -> int:
        """Bits of a value of K; 16 if its dtype is not known."""
        if self.keys is not None and self.keys.k_scales is not None:
            return 4
        return 16 if self.key_dtype is None else 8 * self.key_dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """A kernel that launch configurations name."""

    address: str
    """module:name."""
    serves: Callable[[LayerTraits], bool]
    hides: bool = True
    """Whether it serves custom masks and items."""
    takes_whole_rows: bool = False
    """Whether rows have to begin at multiples of 16 bytes, see `whole_rows`."""
    leaves_parts: bool = False
    """Whether `LatentMerge` has to merge the partial results."""


def _always(traits: LayerTraits) -> bool:
    return True


def _serves_rows(traits: LayerTraits) -> bool:
    """Q of 16 bits; whole rows of keys, not latent; no biases."""
    layer, keys = traits.layer, traits.keys
    return (
        (traits.dtype in SIXTEEN_BITS and not traits.shape.is_latent)
        and (layer.alibi_slopes is None and layer.relative_bias is None)
        and (keys is None or (has_whole_rows(keys.k) and has_whole_rows(keys.v)))
    )


def _serves_shares(traits: LayerTraits) -> bool:
    is_served = traits.shape.dims in SHARE_DIMS and traits.key_dtype in (traits.dtype, *EIGHT_BITS)
    return is_served and _serves_rows(traits)


def _serves_tiles(traits: LayerTraits) -> bool:
    shape = traits.shape
    has_dims = (
        shape.real_d in TILE_DIMS
        and shape.real_tail % 16 == 0
        and shape.real_dv in (shape.real_d, shape.real_d + shape.real_tail)
    )
    has_dtype = traits.key_dtype == traits.dtype
    if traits.rounds != "none":
        has_dtype = traits.key_dtype == torch.float8_e4m3fn and not shape.real_tail
    return has_dims and has_dtype and _serves_rows(traits)


def _serves_latent(traits: LayerTraits) -> bool:
    shape, layer, keys = traits.shape, traits.layer, traits.keys
    return (
        traits.dtype in SIXTEEN_BITS
        and (shape.is_latent and (shape.real_d, shape.real_tail) == LATENT_DIMS)
        and (keys is not None and keys.k.dtype == traits.dtype and has_whole_rows(keys.k))
        and (layer.is_causal and not layer.is_cross_attention)
        and (layer.sliding_window_size < 0 and layer.attention_chunk_size <= 0)
        and (layer.logit_cap <= 0 and layer.sinks is None)
        and traits.page_size == 1
    )


KERNELS = "attnmux.triton.kernels"
TILE_KERNELS: Mapping[str, AttentionKernel] = {
    PORTABLE: AttentionKernel(address=f"{KERNELS}.tiles:attend_tiles", serves=_always),
    HOPPER: AttentionKernel(
        address=f"{KERNELS}.hopper.tiles:attend_hopper_tiles",
        serves=_serves_tiles,
        hides=False,
        takes_whole_rows=True,
    ),
    HOPPER_LATENT: AttentionKernel(
        address=f"{KERNELS}.hopper.latent_tiles:attend_latent_tiles",
        serves=_serves_latent,
        hides=False,
        takes_whole_rows=True,
    ),
}
SHARE_KERNELS: Mapping[str, AttentionKernel] = {
    PORTABLE: AttentionKernel(address=f"{KERNELS}.shares:attend_shares", serves=_always),
    HOPPER: AttentionKernel(
        address=f"{KERNELS}.hopper.shares:attend_shares",
        serves=_serves_shares,
        takes_whole_rows=True,
    ),
    HOPPER_LATENT: AttentionKernel(
        address=f"{KERNELS}.hopper.latent:attend_latent",
        serves=_serves_latent,
        hides=False,
        takes_whole_rows=True,
        leaves_parts=True,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatch:
    """Chooses a layer's launch configurations. Each names its kernel."""

    traits: LayerTraits
    arch: str
    """See `Platform.arch`."""
    page_size: int
    """The pool's."""
    tables: ConfigTables = field(default_factory=ConfigTables)
    deterministic: bool = False
    """Whether a request's bits must not depend on its batch, as they do on the height of tiles."""

    def tiles(self, *, hides: bool) -> TileConfig:
        """For many new tokens a request. hides: in steps with a custom mask or items."""
        return self._safe(self.tables.tiles(self._query(TILE_KERNELS, 1, hides=hides)))

    def short_tiles(self) -> TileConfig | None:
        """Tiles of the same kernel that are less tall; None if there are none."""
        if self.deterministic:
            return None
        query = self._query(TILE_KERNELS, 1, hides=False)
        tall, short = self.tables.tiles(query), self.tables.short_tiles(query)
        if short is None or short.kernel != tall.kernel or short.block_m >= tall.block_m:
            return None
        return short

    def chains(self, queries: int) -> TileConfig | None:
        """For chains of `queries` drafts; None for those that are verified in shares."""
        config = self.tables.chains(self._query(TILE_KERNELS, queries, hides=False))
        return None if config is None else self._safe(config)

    def shares(self, queries: int, *, hides: bool) -> ShareConfig:
        """For `queries` new tokens a request."""
        return self._safe(self.tables.shares(self._query(SHARE_KERNELS, queries, hides=hides)))

    def whole_shares(self, queries: int) -> ShareConfig:
        """Like `shares`, with the table's rows of a tile, which a tuner varies."""
        return self.tables.whole_shares(self._query(SHARE_KERNELS, queries, hides=False))

    def _safe(self, config: C) -> C:
        """The configuration with tiles that are compiled correctly, see NARROW_V."""
        traits = self.traits
        if self.arch != "sm90" or traits.key_bits > 8 or traits.shape.dv > NARROW_V:
            return config
        return replace(config, block_m=min(config.block_m, LEAST_WARPGROUP_ROWS // 2))

    def _query(
        self, kernels: Mapping[str, AttentionKernel], queries: int, *, hides: bool
    ) -> ConfigQuery:
        traits = self.traits
        serving = frozenset(
            name
            for name, kernel in kernels.items()
            if (kernel.hides or not hides)
            and kernel.serves(traits)
            and (name == PORTABLE or can_compile(kernel.address))
        )
        return ConfigQuery.of(
            traits.shape, queries, self.arch, self.page_size, serving, traits.key_bits
        )


def can_compile(address: str) -> bool:
    """Whether this Triton has the Gluon that a kernel is written in."""
    # The interpreter has none.
    return (
        not triton.knobs.runtime.interpret
        and SpecifierSet(HOPPER_RELEASES).contains(triton.__version__, prereleases=True)
        and _is_importable(address)
    )


def kernel_at(address: str) -> Any:  # noqa: ANN401  # a JITFunction or what interprets one
    return resolve_name(address)


@cache
def _is_importable(address: str) -> bool:
    try:
        kernel_at(address)
    except ImportError:
        return False
    return True
