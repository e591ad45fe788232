"""A read-only mapping that hashes and pickles, for the fields of frozen dataclasses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

V = TypeVar("V")


class FrozenMapping(Mapping[str, V]):
    """A copy of a mapping that cannot be changed.

    `types.MappingProxyType` neither hashes nor pickles, and decisions travel between processes.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        self._items: dict[str, V] = dict(items or {})

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"FrozenMapping({self._items!r})"

    def __reduce__(self) -> tuple[type[FrozenMapping[V]], tuple[dict[str, V]]]:
        return FrozenMapping, (self._items,)
