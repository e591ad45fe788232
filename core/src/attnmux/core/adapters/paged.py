"""Layers of adapters that share page tables, and the base of their backends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import torch

from attnmux.core.adapters.library import B, K, LibraryBackend, S
from attnmux.core.adapters.page_tables import KeyGroup


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
    """Those of the kernel that no step changes, by its names."""
    group: KeyGroup | None = None
    """None for a layer that the pool does not store."""
    kv: tuple[torch.Tensor, torch.Tensor] | None = None
    """The pool's memory as the kernel takes it, such as [pages, page, Hkv, D]."""


class PagedBackend(LibraryBackend[K, L, S, B], Generic[K, L, S, B]):
    """A `LibraryBackend` whose layers say where their keys are."""

    @cached_property
    def key_groups(self) -> tuple[KeyGroup, ...]:
        """Those that a step's page tables are built for."""
        groups = (layer.group for layer in self._layers.values() if layer.group is not None)
        return tuple(dict.fromkeys(groups))
