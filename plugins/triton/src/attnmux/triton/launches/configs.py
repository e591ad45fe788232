"""Launch configurations: tile sizes, warps and stages of a kernel, and which layers each is for.

`config_tables.py` holds them, `dispatch.py` looks them up for a layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Generic, TypeVar, get_type_hints

from attnmux.core import FrozenMapping
from attnmux.triton.launches.shapes import LEAST_WIDTH, Shape, Width, next_power_of_2

PORTABLE = "portable"
"""The kernels that Triton compiles for any GPU. `dispatch.py` lists the others."""
HOPPER = "hopper"
HOPPER_LATENT = "hopper_latent"

NOTHING: FrozenMapping[int] = FrozenMapping()


@dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """How `attend_tiles` is launched."""

    kernel: str = PORTABLE
    block_m: int
    """Rows of a tile; a row is one query head of one new token."""
    block_n: int
    """Keys of a block."""
    num_warps: int
    num_stages: int
    """Stages of the loop over blocks. A block's slots are loaded half as many stages ahead of its
    keys."""
    programs_per_unit: int = 1
    """Programs that run on a compute unit at a time."""
    constants: FrozenMapping[int] = NOTHING
    """Further constants of a kernel that is not the portable one, by name."""
    options: FrozenMapping[int] = NOTHING
    """The compiler's options other than `num_warps`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareConfig:
    """How `attend_shares` is launched."""

    kernel: str = PORTABLE
    block_m: int
    """The most rows of a tile; it has fewer if a request has fewer."""
    least_block_m: int = LEAST_WIDTH
    """The fewest rows of a tile."""
    block_n: int
    num_warps: int
    num_stages: int
    """See `TileConfig.num_stages`."""
    programs_per_unit: int
    """Programs that run on a compute unit at a time."""
    least_share: int
    """The fewest blocks of a program: merging smaller shares costs more than it saves."""
    merged_rows: int
    """Rows of partial results that are merged at a time: they are held in registers."""
    meets_ends: bool = False
    """Shares may be longer to end where items end, and a request's items lie side by side instead
    of in the line: see `plan_shares` and `attend_latent`. For kernels whose partial results are
    expensive."""
    constants: FrozenMapping[int] = NOTHING
    """See `TileConfig.constants`."""
    options: FrozenMapping[int] = NOTHING
    """See `TileConfig.options`."""

    def for_rows(self, rows: int) -> ShareConfig:
        """With tiles of no more rows than a request has."""
        most = max(next_power_of_2(rows), self.least_block_m)
        return replace(self, block_m=min(most, self.block_m))


C = TypeVar("C", TileConfig, ShareConfig)


def number_fields(kind: type[TileConfig] | type[ShareConfig]) -> frozenset[str]:
    """The fields that hold one number."""
    types = get_type_hints(kind)
    return frozenset(field.name for field in fields(kind) if types[field.name] is int)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigQuery:
    """A layer and its kernels, as a configuration is looked up for them."""

    arch: str
    """See `Platform.arch`."""
    width: Width
    dims: tuple[int, int]
    columns: int
    rows: int
    page: int
    key_bits: int
    kernels: frozenset[str]

    @classmethod
    def of(
        cls,
        shape: Shape,
        queries: int,
        arch: str,
        page: int,
        kernels: Iterable[str],
        key_bits: int,
    ) -> ConfigQuery:
        """queries: new tokens of a request."""
        return cls(
            arch=arch,
            width=shape.width,
            dims=shape.dims,
            columns=shape.d + shape.tail + shape.dv,
            rows=queries * shape.group,
            page=page,
            key_bits=key_bits,
            kernels=frozenset(kernels),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigEntry(Generic[C]):
    """A configuration and the layers that it is for. A field that is left open fits every layer."""

    arch: str = ""
    """The beginning of the architecture's name."""
    width: Width | None = None
    dims: tuple[int, int] | None = None
    """Columns of K and of V."""
    least_columns: int = 0
    """Columns of the tiles of K's parts and of V together, which shared memory holds."""
    least_rows: int = 0
    """For shares, query heads of a KV head times new tokens of a request; for tiles, the heads."""
    page: int | None = None
    key_bits: int | None = None
    """Bits of a value of K."""
    config: C
    measured: str = ""
    """The machine and the Triton of the measurement; empty if nothing was measured."""

    def fits(self, query: ConfigQuery) -> bool:
        return (
            query.arch.startswith(self.arch)
            and self.width in (None, query.width)
            and self.dims in (None, query.dims)
            and self.least_columns <= query.columns
            and self.least_rows <= query.rows
            and self.page in (None, query.page)
            and self.key_bits in (None, query.key_bits)
            and self.config.kernel in query.kernels
        )

    @property
    def specificity(self) -> tuple[int, bool, int, int, bool, bool]:
        """Entries compare by this: first by how much of the architecture's name they give ("sm90"
        before "sm" before ""), then by dims, columns, rows, page and the keys' bits."""
        return (
            len(self.arch),
            self.dims is not None,
            self.least_columns,
            self.least_rows,
            self.page is not None,
            self.key_bits is not None,
        )
