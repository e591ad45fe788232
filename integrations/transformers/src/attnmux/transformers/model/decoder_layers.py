"""The decoder layers of a model, found by their attention modules."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def decoder_layers(
    model: torch.nn.Module,
) -> Iterator[tuple[torch.nn.Module, torch.nn.Module, int]]:
    """Each layer of the model's lists of layers, with its attention module and number."""
    for modules in model.modules():
        if not isinstance(modules, torch.nn.ModuleList):
            continue
        for layer in modules:
            numbered = {
                number: module
                for module in layer.modules()
                if isinstance(number := getattr(module, "layer_idx", None), int)
            }
            if len(numbered) == 1:
                ((number, attention),) = numbered.items()
                yield layer, attention, number
