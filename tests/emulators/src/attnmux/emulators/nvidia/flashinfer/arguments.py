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


def refuse_unusual(*arguments: tuple[object, object]) -> None:
    """arguments: values and their defaults."""
    if any(value != usual for value, usual in arguments):
        raise NotImplementedError("an argument that the emulator does not know")


def items_of(
    prefix_len_ptr: torch.Tensor | None,
    token_pos_in_items_ptr: torch.Tensor | None,
    token_pos_in_items_len: int,
    max_item_len_ptr: torch.Tensor | None,
    batch_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """What kernels read by address, which the library does not look at: dtype, size and layout.

    A wrapper masks by items as soon as it has the lengths of prefixes.
    """
    if prefix_len_ptr is None:
        return None
    given = {
        "prefix_len_ptr": (prefix_len_ptr, torch.uint32, batch_size),
        "token_pos_in_items_ptr": (
            token_pos_in_items_ptr, torch.uint16, batch_size * token_pos_in_items_len,
        ),
        "max_item_len_ptr": (max_item_len_ptr, torch.uint16, batch_size),
    }  # fmt: skip
    for name, (values, dtype, count) in given.items():
        if values is None or values.dtype != dtype or not values.is_contiguous():
            raise RuntimeError(f"CUDA error: illegal memory access: {name} is no {dtype} in a row")
        if values.numel() != count:
            raise RuntimeError(f"CUDA error: illegal memory access: {name} has no {count} values")
    places = buffer_of(token_pos_in_items_ptr).view(batch_size, token_pos_in_items_len)
    return prefix_len_ptr, places, buffer_of(max_item_len_ptr)
