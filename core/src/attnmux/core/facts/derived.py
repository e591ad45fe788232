"""Requests for the groups of a model's layers."""

from __future__ import annotations

from attnmux.core.facts.request import Request


def group_requests(request: Request) -> tuple[Request, ...]:
    """A request for each group of layers that are alike, that of the fields first."""
    if not request.other_layers:
        return (request,)
    first = request.replace(origin="model", other_layers=())
    plain = first.replace(
        origin="model",
        linear_layers=(),
        linear_head_dim=None,
        linear_v_head_dim=None,
        multimodal=False,
        encoder_head_dim=None,
        phases=tuple(phase for phase in request.phases if phase != "encoder"),
    )
    others = (plain.replace(origin="model", **group.needs()) for group in request.other_layers)
    return (first, *others)
