"""Models whose attention modules run more than once in a step, each time with K and V of its own.

Differential attention attends twice in each layer, and recurrent-depth models run their layers
again. Each call is then a layer of its own to the backend and the KV pool, numbered in the order of
the step. `layer_idx` cannot tell the calls apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from attnmux.core import InvalidInput

CALLS = "_attnmux_calls"
"""The attribute of an attention module: the `NumberedCalls` of its model."""


class NumberedCalls:
    """Counts the attention calls of a step."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        """modules: those that attend in a step, in order, each as often as it does."""
        self._modules = modules
        self._next = 0

    def begin(self, *_: object) -> None:
        """A step begins."""
        self._next = 0

    def take(self, module: torch.nn.Module) -> int:
        """The layer of the module's next call. Raises InvalidInput for a call out of order."""
        number = self._next
        if number >= len(self._modules) or self._modules[number] is not module:
            raise InvalidInput(
                f"attention call {number}",
                got=f"another module, {type(module).__name__}",
                expected="the same calls in each step, as recorded when the backend was built",
            )
        self._next = number + 1
        return number


def number_calls(model: PreTrainedModel, modules: Sequence[torch.nn.Module]) -> None:
    """Let each attention call of a step be a layer of its own. modules: as `NumberedCalls`."""
    calls = NumberedCalls(tuple(modules))
    model.register_forward_pre_hook(calls.begin)
    for module in modules:
        setattr(module, CALLS, calls)


def has_numbered_calls(model: torch.nn.Module) -> bool:
    return any(hasattr(module, CALLS) for module in model.modules())
