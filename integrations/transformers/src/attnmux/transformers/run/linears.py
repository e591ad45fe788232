"""A model's linear layers by a kernel that a plugin offers in place of torch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, Protocol, TypeGuard

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D


class LinearKernel(Protocol):
    """Products of linear layers on one device, without gradients."""

    @property
    def op(self) -> OpOverload | None:
        """The same as a torch op, for code that is compiled or whose operations are recorded, in
        which torch multiplies if it is None."""

    @property
    def fused(self) -> OpOverload | None:
        """`op` with what models do before and after a product; None if there is none.

        Its arguments after the bias are keywords, left out for what is not there. A root mean
        square norm of x has norm_weight [K], norm_offset and eps, a number as a tensor [] on the
        CPU. After the product comes one of these: residual, whose N values are added; gate ("silu",
        "gelu" or "gelu_tanh"), applied to the first half of the columns, which is then multiplied
        by the second; cos and sin of D values, which rotate the heads of D columns before column
        num_rotated.
        """

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


def product_ops(model: torch.nn.Module) -> dict[OpOverload, OpOverload | None]:
    """The ops that multiply in the model's compiled layers, in addition to torch's own, and for
    each the one with what is around the product."""
    kernels = {layer.kernel for layer in model.modules() if isinstance(layer, KernelLinear)}
    return {kernel.op: kernel.fused for kernel in kernels if kernel.op is not None}


def is_plain(module: object) -> TypeGuard[torch.nn.Linear]:
    """Whether a module is a linear map and no more."""
    return type(module) in (torch.nn.Linear, KernelLinear)


Forward = Callable[[torch.Tensor], Any]

ROWS, ROWS_CPU = 64, 8
"""Rows of a block. A larger one wastes more of a decode step and reads weights less often."""

_CLASSES: list[Any] = [kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()]
_ACTIVATIONS: tuple[type[torch.nn.Module], ...] = tuple(dict.fromkeys(_CLASSES))
_BY_ROWS: tuple[type[torch.nn.Module], ...] = (
    *(torch.nn.Linear, Conv1D, torch.nn.LayerNorm, torch.nn.RMSNorm),
    *_ACTIVATIONS,
)


def fix_rows(model: torch.nn.Module, device: torch.device) -> None:
    """Have the layers of a model run on blocks of rows."""
    rows = ROWS_CPU if device.type == "cpu" else ROWS
    routed = [module for module in model.modules() if _routes(module)]
    inside = set(chain.from_iterable(module.modules() for module in routed))
    for module in routed:
        vars(module)["forward"] = partial(one_by_one, module.forward)
    for module in model.modules():
        if module not in inside and _is_by_rows(module):
            vars(module)["forward"] = partial(by_rows, module.forward, rows)


def _routes(module: torch.nn.Module) -> bool:
    """Whether it sends each token to some of its experts."""
    return any(name == "experts" for name, _ in module.named_children())


def _is_by_rows(module: torch.nn.Module) -> bool:
    """Models have classes of norms of their own, whose names say so."""
    return isinstance(module, _BY_ROWS) or type(module).__name__.endswith("Norm")


def by_rows(forward: Forward, rows: int, x: torch.Tensor) -> torch.Tensor:
    """`forward` of x [..., K], of `rows` rows at a time. Returns [..., N]."""
    flat = x.reshape(-1, x.shape[-1])
    count = flat.shape[0]
    padded = torch.nn.functional.pad(flat, (0, 0, 0, -count % rows))
    result = torch.cat([forward(part) for part in torch.split(padded, rows)])[:count]
    return result.view(*x.shape[:-1], result.shape[-1])


def one_by_one(forward: Forward, x: torch.Tensor) -> Any:  # noqa: ANN401  # what the module returns
    """`forward` of x [1, T, K], of one token at a time: a tensor, or a tuple of them."""
    results = [forward(token) for token in torch.split(x, 1, dim=1)]
    if isinstance(results[0], tuple):
        return tuple(_joined(parts) for parts in zip(*results, strict=True))
    return _joined(results)


def _joined(parts: Any) -> torch.Tensor:  # noqa: ANN401  # tensors
    """Tokens are the last dim but one."""
    return torch.cat(list(parts), dim=-2)
