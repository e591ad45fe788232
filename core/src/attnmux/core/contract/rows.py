"""Rows of KV buffers, in the dtype that they store: reading and writing."""

from __future__ import annotations

import torch

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def gather_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The rows of a K or V buffer [slots, H, D] at `slots` [n] int64, in the buffer's dtype."""
    # torch does not gather 8-bit floats on every device
    raw = buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer
    return raw[slots].view(buffer.dtype)


def scatter_rows(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [n, H, D] of the buffer's dtype to its `slots` [n] int64.

    The values of a head are contiguous; tokens and heads may be any distance apart. Does not
    synchronise.
    """
    places = [rows.shape[-1]]
    for tensor in (rows, buffer):
        places += [int(tensor.storage_offset()), *tensor.stride()[:2]]
    word = word_dtype(*(place * buffer.itemsize for place in places))
    buffer.view(word).index_copy_(0, slots, rows.view(word))


def word_dtype(*row_bytes: int) -> torch.dtype:
    """The widest integer dtype whose size divides all of these row lengths in bytes.

    Rows are copied as words of it. On a CPU index_copy_ copies one element after another, so few
    wide elements are faster. It does not support 8-bit floats.
    """
    return next(word for word in _WORDS if not any(size % word.itemsize for size in row_bytes))


def words_of(buffer: torch.Tensor) -> torch.Tensor:
    """The buffer [slots, Hkv, D] as the widest integers that its rows and strides divide into; see
    `word_dtype`. The dims of one slot are joined if they are contiguous."""
    slots, heads, dim = buffer.shape
    if heads == 1 or buffer.stride(1) == dim:
        buffer = buffer.as_strided((slots, heads * dim), (buffer.stride(0), 1))
    lengths = (buffer.shape[-1], int(buffer.storage_offset()), *buffer.stride()[:-1])
    return buffer.view(word_dtype(*(length * buffer.itemsize for length in lengths)))


def write_rows(words: torch.Tensor, loc: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows [T, …], already of the stored dtype, to words[loc], a view of `words_of`."""
    rows = (rows.flatten(1) if words.dim() == 2 else rows).contiguous()
    if rows.storage_offset() * rows.itemsize % words.itemsize:
        rows = rows.clone()  # the slice begins in the middle of a word
    words.index_copy_(0, loc, rows.view(words.dtype))
