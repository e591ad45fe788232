"""The backends and the states of layers without softmax attention, as the contract names them."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from attnmux.core.contract.batch import ForwardBatch


class LinearStates(Protocol):
    """The states of a model's linear layers: a `LinearStatePool`."""

    @property
    def nbytes(self) -> int: ...


class LinearLayers(Protocol):
    """The backend of the linear layers of one kind: a `LinearAttentionBackend`, whose
    `LinearLayerSpec` each call takes."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,  # noqa: ANN401  # its type lies above the contract
        batch: ForwardBatch,
        *,
        g: torch.Tensor,
        beta: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        layer: Any,  # noqa: ANN401  # as above
        batch: ForwardBatch,
        *,
        bias: torch.Tensor | None = None,
        silu: bool = False,
        index: int = 0,
    ) -> torch.Tensor: ...
