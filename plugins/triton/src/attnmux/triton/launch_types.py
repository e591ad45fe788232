"""What a launch is, and what an entry of the tables of launches says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from typing import Generic, Literal, TypeVar

from attnmux.core.choosing.frozen import FrozenMapping
from attnmux.triton.shapes import LEAST_WIDTH, Shape

Width = Literal["narrow", "wide", "latent"]
"""Of K and V, whichever is wider: up to 128 columns, up to 256, more."""

PORTABLE = "portable"
"""The kernels that Triton compiles for anything. Others are for the architectures of their
entries; `serving.py` says what each serves."""
HOPPER = "hopper"
HOPPER_LATENT = "hopper_latent"

NOTHING_MORE: FrozenMapping[int] = FrozenMapping()


@dataclass(frozen=True, kw_only=True, slots=True)
class TileLaunch:
    """Of `attend_tiles`."""

    kernel: str = PORTABLE
    block_m: int
    """Rows of a tile: query heads of new tokens."""
    block_n: int
    """Keys of a block."""
    num_warps: int
    num_stages: int
    """Of the loop over blocks: the slots of a block are loaded half of them ahead of its keys."""
    more: FrozenMapping[int] = NOTHING_MORE
    """What another kernel than the portable one is told besides, by its names."""
    options: FrozenMapping[int] = NOTHING_MORE
    """The compiler's, besides `num_warps`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareLaunch:
    """Of `attend_shares`."""

    kernel: str = PORTABLE
    block_m: int
    """Rows of a tile at most; fewer where a request has fewer."""
    least_block_m: int = LEAST_WIDTH
    """Rows of a tile at least."""
    block_n: int
    num_warps: int
    num_stages: int
    """As `TileLaunch.num_stages`."""
    programs_per_unit: int
    """Programs that a compute unit runs at a time."""
    least_share: int
    """Blocks that a program takes at least: below it, merging costs more than waiting."""
    merged_rows: int
    """Of partial results, at a time: they are held in registers."""
    meets_ends: bool = False
    """Shares of equally long requests may be longer to end where an item does: for kernels to which
    partial results are dear."""
    more: FrozenMapping[int] = NOTHING_MORE
    """As `TileLaunch.more`."""
    options: FrozenMapping[int] = NOTHING_MORE
    """As `TileLaunch.options`."""


L = TypeVar("L", TileLaunch, ShareLaunch)


def tuned_fields(kind: type[TileLaunch] | type[ShareLaunch]) -> frozenset[str]:
    """Those without a default: what a tuner may vary."""
    return frozenset(field.name for field in fields(kind) if field.default is MISSING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry(Generic[L]):
    """A launch and the layers that it is for; what is left open it serves whatever it is."""

    arch: str = ""
    """What the architecture's name begins with."""
    width: Width | None = None
    dims: tuple[int, int] | None = None
    """Columns of K and of V."""
    least_rows: int = 0
    """Query heads of a KV head times new tokens of a request; of tiles, the heads alone."""
    page: int | None = None
    key_bits: int | None = None
    """Of an element of K."""
    launch: L
    measured: str = ""
    """On which machine, with which Triton; empty where nothing was measured."""

    def speaks_of(self, wanted: Wanted) -> bool:
        return (
            wanted.arch.startswith(self.arch)
            and self.width in (None, wanted.width)
            and self.dims in (None, wanted.dims)
            and self.least_rows <= wanted.rows
            and self.page in (None, wanted.page)
            and self.key_bits in (None, wanted.key_bits)
            and self.launch.kernel in wanted.kernels
        )

    @property
    def says(self) -> tuple[int, bool, int, bool, bool]:
        """The more, the more specific."""
        return (
            len(self.arch),
            self.dims is not None,
            self.least_rows,
            self.page is not None,
            self.key_bits is not None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a launch is looked up for."""

    arch: str
    """As `Platform.arch`."""
    width: Width
    dims: tuple[int, int]
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
    ) -> Wanted:
        return cls(
            arch=arch,
            width=width_of(shape),
            dims=dims_of(shape),
            rows=queries * shape.group,
            page=page,
            key_bits=key_bits,
            kernels=frozenset(kernels),
        )


def dims_of(shape: Shape) -> tuple[int, int]:
    """Columns of K and of V."""
    return shape.real_d + shape.real_tail, shape.real_dv


def width_of(shape: Shape) -> Width:
    widest = max(shape.d, shape.dv)
    if widest <= 128:
        return "narrow"
    return "wide" if widest <= 256 else "latent"
