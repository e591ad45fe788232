"""How the kernels are launched: which entry of the tables counts for a layer.

Of the entries that speak of it the most specific one: first by how much of the architecture's name
it says ("sm90" before "sm" before ""), then by dims, rows, page and the keys' bits. Those that were
measured on this machine come before all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from attnmux.triton.launch_tables import SHARES, TILES
from attnmux.triton.launch_types import (
    PORTABLE,
    Entry,
    L,
    ShareLaunch,
    TileLaunch,
    Wanted,
)
from attnmux.triton.shapes import Shape, next_power_of_2


@dataclass(frozen=True, kw_only=True, slots=True)
class Launches:
    """The tables, with what was measured on this machine."""

    own_tiles: Sequence[Entry[TileLaunch]] = ()
    """Of this machine: they count before all others."""
    own_shares: Sequence[Entry[ShareLaunch]] = ()

    def tiles(
        self,
        shape: Shape,
        arch: str,
        page: int = 1,
        kernels: Iterable[str] = (PORTABLE,),
        key_bits: int = 16,
    ) -> TileLaunch:
        """For many new tokens."""
        wanted = Wanted.of(shape, 1, arch, page, kernels, key_bits)
        return _found(wanted, self.own_tiles) or _required(wanted, TILES)

    def shares(
        self,
        shape: Shape,
        queries: int,
        arch: str,
        page: int = 1,
        kernels: Iterable[str] = (PORTABLE,),
        key_bits: int = 16,
    ) -> ShareLaunch:
        """For `queries` new tokens a request."""
        wanted = Wanted.of(shape, queries, arch, page, kernels, key_bits)
        launch = _found(wanted, self.own_shares) or _required(wanted, SHARES)
        rows = max(next_power_of_2(queries * shape.group), launch.least_block_m)
        return replace(launch, block_m=min(rows, launch.block_m))


def _found(wanted: Wanted, entries: Sequence[Entry[L]]) -> L | None:
    """Of two that say as much, the later."""
    fitting = [entry for entry in reversed(entries) if entry.speaks_of(wanted)]
    return max(fitting, key=lambda entry: entry.says).launch if fitting else None


def _required(wanted: Wanted, entries: Sequence[Entry[L]]) -> L:
    """The entries for any architecture speak of every width."""
    launch = _found(wanted, entries)
    if launch is None:
        raise LookupError(f"no launch for {wanted}")
    return launch
