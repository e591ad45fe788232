"""The rotation before rows are rounded to 8 bits, which spreads a large value over a whole row."""

from __future__ import annotations

import torch

from attnmux.core.errors import InvalidInput


def hadamard(size: int, *, device: torch.device | str) -> torch.Tensor:
    """Sylvester's matrix of 1 and -1 over the root of its size, [size, size] float32: orthogonal
    and symmetric.

    Raises InvalidInput unless the size is a power of 2.
    """
    if size < 1 or size & (size - 1):
        raise InvalidInput("size", got=size, expected="a power of 2")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix.mul(float(size) ** -0.5).to(device)
