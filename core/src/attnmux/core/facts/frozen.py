"""Facts: read-only containers for frozen dataclasses, their defaults, and plain data for JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar, overload

V = TypeVar("V")


def defaults(kind: type[Any]) -> Mapping[str, Any]:
    """The fields of a dataclass that have a default, in their order; not those with a factory."""
    return {field.name: field.default for field in fields(kind) if field.default is not MISSING}


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


class Deferred(Sequence[V]):
    """The tuple that `make` returns, made when it is first read.

    It compares, hashes and prints like that tuple, and pickles and copies as that tuple.
    """

    __slots__ = ("_items", "_make")

    def __init__(self, make: Callable[[], tuple[V, ...]]) -> None:
        self._make: Callable[[], tuple[V, ...]] | None = make
        self._items: tuple[V, ...] = ()

    def _all(self) -> tuple[V, ...]:
        if self._make is not None:
            self._items = self._make()
            self._make = None  # releases everything that the tuple was made from
        return self._items

    @overload
    def __getitem__(self, index: int) -> V: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[V, ...]: ...

    def __getitem__(self, index: int | slice) -> V | tuple[V, ...]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())

    def __iter__(self) -> Iterator[V]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Deferred):
            return self._all() == other._all()
        return self._all() == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())

    def __reduce__(self) -> tuple[type[tuple[V, ...]], tuple[tuple[V, ...]]]:
        return tuple, (self._all(),)


ATOMS = frozenset({str, int, float, bool, type(None)})


class Plain:
    """A dataclass that can be written as plain data."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as `plain` data."""
        return plain_fields(self)


def plain_fields(fact: Any) -> dict[str, Any]:  # noqa: ANN401  # any dataclass
    return {name: plain(getattr(fact, name)) for name in fact.__dataclass_fields__}


def plain(value: Any) -> Any:  # noqa: ANN401  # any value
    """Facts and mappings as dictionaries, sequences as lists, sets as sorted lists, and any other
    value, such as a condition, as text."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, Plain):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return sorted(value) if isinstance(value, frozenset) else str(value)
