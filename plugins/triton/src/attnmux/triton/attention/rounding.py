"""What prompts over e4m3 K and V may round to e4m3, to multiply in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from attnmux.core import InvalidInput, Request
from attnmux.triton.launches.dispatch import Rounding
from attnmux.triton.plugin import ROUNDED_ERROR


def rounding(options: Mapping[str, object], request: Request) -> Rounding:
    """What the option says; "all" without it if the request's `max_error` admits their error.

    Raises InvalidInput if the option asks for more than the request admits.
    """
    chosen = cast("Rounding", options.get("fp8_products", "none"))
    most = request.max_error
    if most is None:
        return chosen
    if most >= ROUNDED_ERROR:
        return "all" if chosen == "none" else chosen
    if chosen != "none":
        raise InvalidInput(
            "fp8_products",
            got=f"{chosen} with max_error={most:g}",
            expected=f"none, or a max_error of at least {ROUNDED_ERROR}",
        )
    return "none"
