"""A model's linear layers by a kernel that a plugin offers in place of torch's."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch


class LinearKernel(Protocol):
    """Products of linear layers on one device, without gradients."""

    def serves(self, weight: torch.Tensor) -> bool:
        """Whether it multiplies by a weight [N, K]."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """As `torch.nn.functional.linear`."""


def multiply_by(kernel: LinearKernel, model: torch.nn.Module) -> None:
    """Have a model's plain linear layers call the kernel wherever it serves them.

    Layers keep a `forward` of a subclass or of their own, as absorbed ones have. While a compiler
    traces a layer, it calls torch.
    """
    for module in model.modules():
        if not isinstance(module, torch.nn.Linear) or type(module) is not torch.nn.Linear:
            continue
        if "forward" not in vars(module) and kernel.serves(module.weight):
            module.forward = partial(_forward, module, kernel)  # type: ignore[method-assign]  # of this instance


def _forward(module: torch.nn.Linear, kernel: LinearKernel, x: torch.Tensor) -> torch.Tensor:
    weight, bias = module.weight, module.bias
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or x.dtype is not weight.dtype:
        return torch.nn.functional.linear(x, weight, bias)
    return kernel(x, weight, bias)
