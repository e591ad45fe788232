"""Facts as plain data, for JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [plain(each) for each in value]
    return sorted(value) if isinstance(value, frozenset) else str(value)
