"""A model whose layers treat each token alike, whatever other tokens a step has.

Libraries take another kernel, with other sums, for another number of rows. Here each layer that
sums over a token's values runs on blocks with a fixed number of rows, the last one padded. Routed
experts have as many rows as tokens chose them, so that they run a token at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from transformers.activations import ACT2CLS
from transformers.pytorch_utils import Conv1D

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
