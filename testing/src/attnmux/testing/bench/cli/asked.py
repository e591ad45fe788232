"""The request of a verb that measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from attnmux.core import InvalidInput, Platform, Request
from attnmux.core.verbs import requested
from attnmux.parts import linear_request


def read_share(context: click.Context, option: click.Parameter, text: str) -> tuple[int, int]:
    """ "1/2" → (0, 2): the first of two equal parts. A callback of click."""
    part, _, parts = text.partition("/")
    if part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts):
        return int(part) - 1, int(parts)
    raise click.BadParameter(f"{text!r} is none of 1/2 and 2/2, as for two processes")


def asked_of_one_shape(
    model: str | None,
    fields: Sequence[str],
    tp: int,
    *,
    assume: Callable[[str], None] | None = None,
) -> Request:
    """The model's needs, overruled by the user's fields. fields, assume: as `requested` takes them.

    A kind of linear layers in the fields asks for the model's layers of that kind.
    Raises InvalidInput as `requested`, for layers of several shapes, and for linear layers that the
    model does not have.
    """
    stated = Request.parse(*fields)
    kind = stated.kind
    if model is not None and stated.is_linear:
        whole = requested(model, (), tp, None, assume=assume)
        kinds = dict(whole.linear_layers)
        if kind not in kinds:
            expected = f"a kind of the model's linear layers: {', '.join(kinds) or 'it has none'}"
            raise InvalidInput("--request", got=f"kind={kind}", expected=expected)
        changes = {name: getattr(stated, name) for name in stated.origins}
        return linear_request(whole, kind).replace(**changes)
    request = requested(model, fields, tp, None, assume=assume)
    if request.other_layers:
        got = f"layers of {len(request.other_layers) + 1} shapes"
        expected = "layers of one shape: state one of them with --request"
        raise InvalidInput("--model", got=got, expected=expected)
    return request


def other_device(device: str, here: Platform) -> InvalidInput:
    """The refusal of a --device that is none of the platform's."""
    expected = f"a device of {here.name or here}: {here.device_type}, {here.device_type}:1, …"
    return InvalidInput("--device", got=repr(device), expected=expected)
