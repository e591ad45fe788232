"""Names of element types: the canonical ones and the aliases that people type."""

from __future__ import annotations

from attnmux.core.errors import InvalidInput

DTYPES = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")

ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8_e4m3fn": "fp8_e4m3",
    "float8_e4m3": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "fp4": "fp4_e2m1",
}


def canonical_dtype(name: str, argument: str = "dtype") -> str:
    """The canonical name behind `name`; a leading "torch." is allowed.

    Raises InvalidInput, naming `argument`, for a name that is neither canonical nor an alias.
    """
    lowered = name.strip().lower().removeprefix("torch.")
    found = ALIASES.get(lowered, lowered)
    if found not in DTYPES:
        expected = f"one of {', '.join(DTYPES)} (aliases: {', '.join(ALIASES)})"
        raise InvalidInput(argument, came=repr(name), expected=expected)
    return found
