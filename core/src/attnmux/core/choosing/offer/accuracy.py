"""The accuracy that a card promises: bounds on the error of a backend's answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attnmux.core.choosing.common.checks import NAME, Check, check_fields, whole
from attnmux.core.choosing.common.plain import Plain
from attnmux.core.choosing.offer.conditions import ANY, Condition

CHECKS: Mapping[str, Check] = {
    "max_error": Check(
        "a number of roundings, more than 0",
        lambda value: type(value) in (int, float) and 0 < value < float("inf"),
    ),
    "keys": whole(1),
    "kv_dtype": Check("a condition", lambda value: isinstance(value, Condition)),
    "source": NAME,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorBound(Plain):
    """The largest error of one query and head, up to a number of keys.

    The unit is the rounding of the output's format, eps / 2. Raises InvalidInput for a field of
    another type, and for an error, keys or a source that are 0 or empty.
    """

    max_error: float
    keys: int
    """The longest context that was tried."""
    kv_dtype: Condition = ANY
    source: str
    """The test or the analysis that found the bound."""

    def __post_init__(self) -> None:
        check_fields("error bound", self, CHECKS)

    def __str__(self) -> str:
        return f"{self.max_error:g} up to {self.keys:,} keys"
