"""Scratch memory that the backends of one context share."""

from __future__ import annotations

import torch


class Workspace:
    """Named byte buffers on one device, kept for reuse and grown when a larger one is asked for.

    Two callers that pass one name share its memory, so a name belongs to uses that never
    overlap in time. Inside a captured graph a buffer must not grow: ask for its largest size
    in `init_cuda_graph_state`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, name: str, nbytes: int, *, zeroed: bool = False) -> torch.Tensor:
        """A uint8 buffer of at least `nbytes`.

        With `zeroed` it holds zeros when it is made or grown; a kernel that needs zeros at
        every launch has to leave them behind.
        """
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < nbytes:
            make = torch.zeros if zeroed else torch.empty
            # A tensor made in inference mode could not be written outside of it later.
            with torch.inference_mode(False):
                buffer = make(nbytes, dtype=torch.uint8, device=self.device)
            self._buffers[name] = buffer
        return buffer

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor over the named buffer."""
        count = 1
        for extent in shape:
            count *= extent
        nbytes = count * dtype.itemsize
        return self.get(name, nbytes)[:nbytes].view(dtype).view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(buffer.numel() for buffer in self._buffers.values())
