"""The context of the backends that attend to the parts of a split step."""

from __future__ import annotations

from dataclasses import replace

from attnmux.core import BackendContext, InvalidInput
from attnmux.parts import PartAttention, parts_request


def split_context(context: BackendContext) -> BackendContext:
    """The `PartAttention.context_of` of those layers of a model's context that can be merged.

    Raises InvalidInput for a context without such layers, and as `PartAttention.context_of` does
    for MLA without `head_dim`, an encoder's layers and cross attention.
    """
    mergeable = tuple(layer for layer in context.layers if layer.is_mergeable)
    if not mergeable:
        expected = "a layer without a window, attention chunks and biases"
        raise InvalidInput("layers", got="none that can be merged", expected=expected)
    # A chunk of a step has two pieces of each request
    most = 2 * context.max_batch_size
    of_layers = replace(context, layers=mergeable, max_batch_size=most)
    return PartAttention.context_of(of_layers, parts_request(context.request))
