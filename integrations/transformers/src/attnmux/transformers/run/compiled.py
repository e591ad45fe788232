"""Compiles a model's layers with torch.compile: the code of one layer serves all that are alike.

Attention stays one opaque op, so that any backend serves compiled layers, eagerly and in device
graphs. Embeddings, the last norm and the output head run as they are.
"""

from __future__ import annotations

import torch

from attnmux.transformers.model.decoder_layers import decoder_layers
from attnmux.transformers.model.layer_call import mark_layer
from attnmux.transformers.run.linears import product_ops
from attnmux.transformers.run.merged import ShareProducts, merge, split


def compile_layers(model: torch.nn.Module, backend: str = "inductor") -> int:
    """Have each decoder layer compiled when it is next called. Returns the number of layers.

    backend: as `torch.compile` takes it.
    """
    layers = list(decoder_layers(model))
    options = None
    if backend == "inductor":
        options = {"post_grad_custom_pre_pass": ShareProducts(product_ops(model))}
    for layer, attention, layer_id in layers:
        mark_layer(attention, layer_id)
        merge(layer)
        # Steps have any number of tokens.
        layer.compile(dynamic=True, backend=backend, options=options)
    return len(layers)


def undo(model: torch.nn.Module) -> None:
    """Run the layers as before `compile_layers`."""
    for layer, _, _ in decoder_layers(model):
        layer._compiled_call_impl = None
        split(layer)
