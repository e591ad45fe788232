"""Reads of a tensor by the host that leave no trace among torch's operations on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from attnmux.core.errors import GraphViolation

READS: Mapping[object, str] = MappingProxyType(
    {
        getattr(torch.Tensor, name): name
        for name in (
            "cpu",
            "item",
            "tolist",
            "numpy",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
            "__contains__",
            "__array__",
        )
    }
)


class HostReads(TorchFunctionMode):
    """Refuses them while it is entered."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever the function returns
        """Raises GraphViolation for a read of the tensor's values."""
        name = READS.get(func)
        if name is not None:
            raise GraphViolation(
                self._method,
                f"Tensor.{name}",
                "synchronises with the device",
                hint="read values on the host in init_forward_metadata_out_graph",
            )
        return func(*args, **(kwargs or {}))
