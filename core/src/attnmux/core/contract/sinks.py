"""Attention sinks whose weights change in place, in the forms in which kernels read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch


class Copy(NamedTuple):
    """A tensor that holds the sinks of `source` in another form."""

    source: torch.Tensor
    tensor: torch.Tensor
    form: Callable[[torch.Tensor], torch.Tensor] | None
    """None: the tensor has another dtype alone."""


class SinkCopies:
    """The copies of one layer's sinks, which `AttentionBackend.refresh_sinks` keeps up."""

    def __init__(self) -> None:
        self.all: list[Copy] = []

    def in_dtype(self, sinks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The sinks in that dtype: themselves, or one copy for all that ask."""
        if sinks.dtype == dtype:
            return sinks
        for source, tensor, form in self.all:
            if source is sinks and form is None and tensor.dtype == dtype:
                return tensor
        return self._kept(Copy(sinks, sinks.to(dtype), None))

    def in_form(
        self, sinks: torch.Tensor, form: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The sinks converted by `form`: a tensor of its own."""
        return self._kept(Copy(sinks, form(sinks).clone(), form))

    def _kept(self, copy: Copy) -> torch.Tensor:
        self.all.append(copy)
        return copy.tensor


class HasSinks(Protocol):
    """A `LayerSpec`."""

    @property
    def sinks(self) -> torch.Tensor | None: ...

    @property
    def sink_copies(self) -> SinkCopies: ...


@torch.inference_mode()
def refresh_sinks(layers: Iterable[HasSinks], weights: Sequence[torch.Tensor]) -> None:
    """Copy the weights into the sinks of these layers, as `AttentionBackend.refresh_sinks` says."""
    specs = [layer for layer in layers if layer.sinks is not None]
    of_layers = [spec.sinks for spec in specs if spec.sinks is not None]
    moved = [(to, of) for to, of in zip(of_layers, weights, strict=True) if to is not of]
    _copy(moved)
    copies = [copy for spec in specs for copy in spec.sink_copies.all]
    for source, tensor, form in copies:
        if form is not None:
            tensor.copy_(form(source))
    _copy([(tensor, source) for source, tensor, form in copies if form is None])


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        torch._foreach_copy_([to for to, _ in pairs], [of.detach() for _, of in pairs])
