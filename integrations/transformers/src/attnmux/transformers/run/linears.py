"""A model's linear layers by a kernel that a plugin offers in place of torch's."""

from __future__ import annotations

from typing import Protocol, TypeGuard

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


class LinearKernel(Protocol):
    """Products of linear layers on one device, without gradients."""

    @property
    def op(self) -> OpOverload | None:
        """The same as a torch op, for code that is compiled or whose operations are recorded, in
        which torch multiplies if it is None."""

    def rows(self, weight: torch.Tensor) -> range:
        """The numbers of rows of x that it multiplies by a weight [N, K], if torch is slower."""

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Like `torch.nn.functional.linear`."""


class KernelLinear(torch.nn.Linear):
    """A linear layer that calls the kernel for rows that it serves.

    A class and not a `forward` of each layer: a compiler makes one code for all layers that are
    alike.
    """

    kernel: LinearKernel
    rows: range

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # A step calls this for each layer, and what it reads has left the caches while weights
        # came: parameters are not looked up as attributes, which takes a call of Python for each
        parameters = self._parameters
        weight: torch.Tensor = parameters["weight"]  # type: ignore[assignment]  # it has one
        bias = parameters["bias"]
        sees_ops = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
        product = self.kernel.op if sees_ops else self.kernel
        if (
            product is None
            or torch.is_grad_enabled()
            or not self.rows.start <= input.numel() // input.shape[-1] < self.rows.stop
            or input.dtype is not weight.dtype
        ):
            return torch.nn.functional.linear(input, weight, bias)
        result: torch.Tensor = product(input, weight, bias)
        return result


def multiply_by(kernel: LinearKernel, model: torch.nn.Module) -> None:
    """Have a model's plain linear layers call the kernel wherever it serves them.

    Layers keep a `forward` of a subclass or of their own, as absorbed ones have.
    """
    for module in model.modules():
        if type(module) is not torch.nn.Linear or "forward" in vars(module):
            continue
        rows = kernel.rows(module.weight)
        if rows:
            module.__class__ = KernelLinear
            vars(module).update(kernel=kernel, rows=rows)


def product_ops(model: torch.nn.Module) -> frozenset[OpOverload]:
    """The ops that multiply in the model's compiled layers, in addition to torch's own."""
    kernels = {layer.kernel for layer in model.modules() if isinstance(layer, KernelLinear)}
    return frozenset(kernel.op for kernel in kernels if kernel.op is not None)


def is_plain(module: object) -> TypeGuard[torch.nn.Linear]:
    """Whether a module is a linear map and no more."""
    return type(module) in (torch.nn.Linear, KernelLinear)
