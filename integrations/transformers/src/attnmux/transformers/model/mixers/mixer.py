"""One module of a model that mixes tokens without softmax attention, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from attnmux.core import InvalidInput, LinearLayerSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recurrence:
    """A mixer's call in the contract's terms: see `LinearCall`."""

    kind: str
    """One of `Request.LINEAR_KINDS`."""
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor | None
    scaling: float
    qk_l2norm: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Convolution:
    """The same for `ConvCall`."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool


class Runs(Protocol):
    """Runs the calls of mixers."""

    def recur(self, mixer: Mixer, asked: Recurrence) -> torch.Tensor:
        """[T, Hv, V]"""

    def convolve(self, mixer: Mixer, asked: Convolution, index: int) -> torch.Tensor:
        """[T, C]; index: of the convolution among the layer's."""


@dataclass(kw_only=True, slots=True, eq=False)
class Mixer:
    """One module that calls a function of `mixer_calls`, or has an adapter in `own_recurrences`."""

    number: int
    """Its `LinearLayerSpec.layer_id`."""
    name: str
    """Name of the module in the model."""
    module: torch.nn.Module
    runs: Runs | None = None
    spec: LinearLayerSpec | None = None
    """Known once it was recorded."""
    num_convs: int = 0
    """Convolutions of the running call so far."""

    def recur(self, asked: Recurrence) -> torch.Tensor:
        return self._running().recur(self, asked)

    def convolve(self, asked: Convolution) -> torch.Tensor:
        index, self.num_convs = self.num_convs, self.num_convs + 1
        return self._running().convolve(self, asked, index)

    def _running(self) -> Runs:
        if self.runs is None:
            raise InvalidInput(self.name, got="a call of the model itself", expected="its runner's")
        return self.runs
