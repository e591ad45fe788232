"""A model's linear layers by a kernel that a plugin offers in place of torch's."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch


class LinearKernel(Protocol):
    """Products of linear layers on one device, without gradients."""

    def rows(self, weight: torch.Tensor) -> range:
        """The numbers of rows of x that it multiplies by a weight [N, K], where torch is slower."""

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
        rows = kernel.rows(module.weight)
        if "forward" not in vars(module) and rows:
            module.forward = partial(_forward, module, kernel, rows)  # type: ignore[method-assign]  # of this instance


def leave_to_torch(model: torch.nn.Module) -> None:
    """The inverse of `multiply_by`. Layers that are compiled have one code for all that are alike
    only where none of their modules has a `forward` of its own."""
    for module in model.modules():
        own = vars(module).get("forward")
        if isinstance(own, partial) and own.func is _forward:
            del module.forward


def _forward(
    module: torch.nn.Linear, kernel: LinearKernel, rows: range, x: torch.Tensor
) -> torch.Tensor:
    # A step calls this for each layer, and what it reads has left the caches while weights came:
    # parameters are not looked up as attributes, which takes a call of Python for each
    weight: torch.Tensor = module._parameters["weight"]  # type: ignore[assignment]  # it has one
    bias = module._parameters["bias"]
    if (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or x.numel() // x.shape[-1] not in rows
        or x.dtype is not weight.dtype
    ):
        return torch.nn.functional.linear(x, weight, bias)
    return kernel(x, weight, bias)
