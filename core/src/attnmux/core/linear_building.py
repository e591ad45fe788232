"""From a decision to the backends of a model's linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnmux.core.errors import InvalidInput
from attnmux.core.factories import make_linear
from attnmux.core.linear_hybrid import HybridLinearAttnBackend, LinearByPhase

if TYPE_CHECKING:
    from attnmux.core.backend import AttentionBackend
    from attnmux.core.choosing.ask.request import Request
    from attnmux.core.choosing.tell.choice import Choice
    from attnmux.core.choosing.tell.decision import Decision
    from attnmux.core.context import BackendContext
    from attnmux.core.linear_backend import LinearAttentionBackend
    from attnmux.core.linear_layer import LinearLayerSpec


def with_linear_layers(
    attention: AttentionBackend, decision: Decision, context: BackendContext
) -> AttentionBackend:
    """The attention backend, which also prepares the decided backends of the linear layers.

    It is `attention` itself where neither the decision nor the context has linear layers. Raises
    InvalidInput where only one of them has some, for layers of other kinds or dims, and for a
    request of two batches.
    """
    states = context.linear_states
    if states is None:
        if not decision.linear:
            return attention
        kinds = ", ".join(decision.linear)
        expected = f"a LinearStatePool for the model's {kinds} layers"
        raise InvalidInput("context.linear_states", got=None, expected=expected)
    if decision.request.two_batches:
        expected = "whole steps: no half of a step prepares its linear layers"
        raise InvalidInput("two_batches", got=True, expected=expected)
    for layer in states.layers:
        _check(layer, decision)
    made: dict[str, LinearAttentionBackend] = {
        kind: _by_phase(decision.linear[kind], context)
        for kind in dict.fromkeys(layer.kind for layer in states.layers)
    }
    return HybridLinearAttnBackend(attention, made)


def _by_phase(served: Mapping[str, Choice], context: BackendContext) -> LinearAttentionBackend:
    leaves = {choice.address: make_linear(choice, context) for choice in served.values()}
    if len(leaves) == 1:
        return next(iter(leaves.values()))
    extend, decode = (leaves[served[phase].address] for phase in ("extend", "decode"))
    return LinearByPhase(extend=extend, decode=decode)


def _check(layer: LinearLayerSpec, decision: Decision) -> None:
    name = f"linear layer {layer.layer_id}"
    if layer.kind not in decision.linear:
        expected = f"a kind that the decision serves: {', '.join(decision.linear) or 'none'}"
        raise InvalidInput(name, got=layer.kind, expected=expected)
    for got, asked in _dims(layer, decision.request):
        if asked is not None and got != asked:
            raise InvalidInput(name, got=f"a head of {got} dims", expected=f"{asked}, as decided")


def _dims(layer: LinearLayerSpec, request: Request) -> tuple[tuple[int, int | None], ...]:
    """(the layer's, the request's) dims of K and V."""
    if not layer.has_state:
        return ()
    k_dim, v_dim = request.linear_head_dim, request.linear_v_head_dim
    return (layer.head_k_dim, k_dim), (layer.head_v_dim, v_dim or k_dim)
