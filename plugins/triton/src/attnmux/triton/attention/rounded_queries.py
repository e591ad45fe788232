"""Whether a backend may round queries to e4m3 to multiply them with keys of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping

from attnmux.core import InvalidInput, Request
from attnmux.triton.plugin import ROUNDED_ERROR


def rounds_queries(options: Mapping[str, object], request: Request) -> bool:
    """Whether the option asks for it, or the request's `max_error` admits its error.

    Raises InvalidInput if the option asks for more than the request admits.
    """
    most = request.max_error
    if most is not None and most < ROUNDED_ERROR:
        if options.get("fp8_products"):
            raise InvalidInput(
                "fp8_products",
                got=f"True with max_error={most:g}",
                expected=f"False, or a max_error of at least {ROUNDED_ERROR}",
            )
        return False
    return most is not None or bool(options.get("fp8_products"))
