"""The request of a verb that measures."""

from __future__ import annotations

from attnmux.core import InvalidInput, Request
from attnmux.core.cli.asking import requested


def asked_of_one_shape(model: str | None, fields: str, tp: int) -> Request:
    """The model's needs, overruled by the user's fields.

    Raises InvalidInput as `requested`, and for layers of several shapes.
    """
    request = requested(model, fields, tp, None)
    if request.other_layers:
        got = f"layers of {len(request.other_layers) + 1} shapes"
        expected = "layers of one shape: state one of them with --request"
        raise InvalidInput("--model", got=got, expected=expected)
    return request
