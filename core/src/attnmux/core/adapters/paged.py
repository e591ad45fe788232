"""Backends whose layers share page tables, and steps of kernels that need a key a request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch

from attnmux.core.adapters.library import B, K, LibraryBackend, S
from attnmux.core.adapters.page_tables import KeyGroup, Keys, PageTables
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.context import BackendContext


class HasKeys(Protocol):
    """A prepared layer that says where its keys are."""

    @property
    def group(self) -> KeyGroup | None:
        """None for a layer that the pool does not store."""


L = TypeVar("L", bound=HasKeys)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PagedLayer:
    """A prepared layer over pages of K and V."""

    arguments: dict[str, Any]
    """Arguments of the kernel that no step changes, by its names."""
    group: KeyGroup | None = None
    """None for a layer that the pool does not store."""
    kv: tuple[torch.Tensor, torch.Tensor] | None = None
    """The pool's memory as the kernel takes it, such as [pages, page, Hkv, D]."""


class PagedBackend(LibraryBackend[K, L, S, B], Generic[K, L, S, B]):
    """A `LibraryBackend` whose layers say where their keys are."""

    @cached_property
    def key_groups(self) -> tuple[KeyGroup, ...]:
        """Groups of keys that a step's page tables are built for."""
        groups = (layer.group for layer in self._layers.values() if layer.group is not None)
        return tuple(dict.fromkeys(groups))


Buffers = TypeVar("Buffers", bound="DecodeBuffers")
Step = TypeVar("Step", bound="DecodeStep")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyLens:
    """Keys of each request, for kernels that need one key at least."""

    at_least_one: torch.Tensor
    """[B] int32. If a request has no keys, its first table entry is the reserved page, which
    kernels may read."""
    is_empty: torch.Tensor
    """[B] bool: requests without keys, whose result is to be replaced."""

    @classmethod
    def buffers(cls, max_bs: int, device: torch.device) -> KeyLens:
        """Buffers for graphs of up to max_bs requests."""
        return cls(
            at_least_one=torch.ones(max_bs, dtype=torch.int32, device=device),
            is_empty=torch.zeros(max_bs, dtype=torch.bool, device=device),
        )

    @classmethod
    def of(cls, lens: torch.Tensor, buffers: KeyLens | None = None) -> KeyLens:
        """From lens [B] int32; written to the front of the buffers if they are given."""
        if buffers is None:
            return cls(at_least_one=lens.clamp(min=1), is_empty=lens == 0)
        size = len(lens)
        return cls(
            at_least_one=torch.clamp(lens, min=1, out=buffers.at_least_one[:size]),
            is_empty=torch.eq(lens, 0, out=buffers.is_empty[:size]),
        )

    def replace(self, rows: torch.Tensor, value: float) -> None:
        """Write `value` to the rows [B, …] of requests without keys."""
        rows.masked_fill_(self.is_empty.view(-1, *[1] * (rows.dim() - 1)), value)


@dataclass(kw_only=True, slots=True, eq=False)
class DecodeBuffers:
    """Fixed tensors that graphs replay with."""

    keys: dict[KeyGroup, Keys]
    lens: KeyLens

    @classmethod
    def of(
        cls: type[Buffers],
        groups: tuple[KeyGroup, ...],
        max_bs: int,
        context: BackendContext,
        *,
        key_tile: int = 1,
        **own: Any,  # noqa: ANN401  # fields of a subclass
    ) -> Buffers:
        """For up to max_bs requests of any length. key_tile: as in `PageTables`."""
        return cls(
            keys=PageTables.buffers(groups, max_bs, context, key_tile=key_tile),
            lens=KeyLens.buffers(max_bs, context.device),
            **own,
        )


@dataclass(kw_only=True, slots=True, eq=False)
class DecodeStep:
    """Page tables and lengths of a step."""

    tables: PageTables
    buffers: DecodeBuffers | None
    may_be_empty: bool
    """Whether the host cannot rule out a request without keys."""
    keys: dict[KeyGroup, Keys] | None = None
    """Set by `fill`, for the kernels. Lengths are at least 1 if `lens` is set."""
    lens: KeyLens | None = None
    """Set by `fill` if a request may be without keys."""

    @classmethod
    def of(
        cls: type[Step],
        batch: ForwardBatch,
        context: BackendContext,
        buffers: DecodeBuffers | None,
        *,
        key_tile: int = 1,
    ) -> Step:
        """The step's shape, known on the host. Raises InvalidInput as `PageTables.of`."""
        known = None if buffers else batch.seq_lens_cpu
        fixed = buffers.keys if buffers else {}
        return cls(
            tables=PageTables.of(batch, context, fixed, key_tile=key_tile),
            buffers=buffers,
            # A draft is a key of its own.
            may_be_empty=batch.forward_mode.is_decode()
            and (known is None or not bool(known.all())),
        )

    def fill(
        self, batch: ForwardBatch, groups: tuple[KeyGroup, ...], context: BackendContext
    ) -> None:
        """Build tables and lengths by device operations of static shape."""
        self.tables.fill(batch, groups, context)
        self.keys = self.tables.keys
        if self.may_be_empty:
            self.lens = KeyLens.of(batch.seq_lens, self.buffers.lens if self.buffers else None)
            self.keys = {
                group: key.with_lens(self.lens.at_least_one) for group, key in self.keys.items()
            }

    def replace_empty(self, rows: torch.Tensor) -> None:
        """Write 0 to the rows [B, …] of requests without keys."""
        if self.lens is not None:
            self.lens.replace(rows, 0)
