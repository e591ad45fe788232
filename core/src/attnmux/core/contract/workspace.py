"""Scratch memory that the backends of one context share."""

from __future__ import annotations

import math

import torch

from attnmux.core.contract.memory import zeros


class Workspace:
    """Named byte buffers on one device, which are reused and grow on demand.

    Callers that pass the same name share its memory, so that their uses must not overlap in time.
    Inside a captured graph a buffer must not grow: request its largest size in
    `init_cuda_graph_state`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, torch.Tensor] = {}
        # The latest view of each name, since every layer of a step asks for the same
        self._views: dict[str, torch.Tensor] = {}

    def get(self, name: str, nbytes: int, *, zeroed: bool = False) -> torch.Tensor:
        """A uint8 buffer of at least `nbytes`.

        With `zeroed` it holds zeros when it is made or grown; a kernel that needs zeros at every
        launch must restore them. A buffer grows by at least a quarter, so that a sequence which
        grows token by token does not allocate at every step.
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            if buffer is not None:
                nbytes = max(nbytes, buffer.numel() * 5 // 4)
            make = zeros if zeroed else torch.empty
            # A tensor made in inference mode could not be written outside of it later
            with torch.inference_mode(False):
                buffer = make((nbytes,), dtype=torch.uint8, device=self.device)
            self._buffers[name] = buffer
            self._views.pop(name, None)
        return buffer

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor over the named buffer."""
        view = self._views.get(name)
        if view is None or view.dtype != dtype or view.shape != shape:
            nbytes = math.prod(shape) * dtype.itemsize
            buffer = self.get(name, nbytes)
            with torch.inference_mode(False):
                view = self._views[name] = buffer[:nbytes].view(dtype).view(shape)
        return view

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() for buffer in self._buffers.values())
