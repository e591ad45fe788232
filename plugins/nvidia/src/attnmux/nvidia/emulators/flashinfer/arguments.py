"""Arguments as the library reads them."""

from __future__ import annotations

import torch


def dtype_of(name: str | torch.dtype | None) -> torch.dtype:
    made = getattr(torch, name) if isinstance(name, str) else name
    if not isinstance(made, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return made


def buffer_of(buffer: torch.Tensor | None) -> torch.Tensor:
    if buffer is None:
        raise ValueError("a buffer should be a torch.Tensor in cudagraph mode")
    return buffer


def refuse(*values: object) -> None:
    if any(value is not None for value in values):
        raise NotImplementedError("an argument that the emulator does not know")
