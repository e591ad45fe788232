"""flashinfer's LSE is in base 2, and a row without keys has one near -5e4 and output 0."""

from __future__ import annotations

import math

import torch

from attnmux.nvidia.flashinfer.kernels import Kernels

LN_2 = math.log(2)

NO_KEYS = -4e4
"""Below it lies the LSE of a row without keys: `math.cuh` starts from -5e4, not from -inf, and
adds log2 of the number of masked keys. No row with keys comes near."""

MAX_THREADS = 1024
"""Of a CUDA block. `MergeState` in cascade.cuh puts all heads of a token into one."""

State = tuple[torch.Tensor, torch.Tensor]
"""Output [T, H, D] and base-2 LSE [T, H] of a part of the keys."""


def writable_lse(lse: torch.Tensor | None) -> torch.Tensor | None:
    """Where kernels can write LSE for the caller's `lse` [T, H]: they take it for contiguous."""
    if lse is None or lse.is_contiguous():
        return lse
    return torch.empty_like(lse, memory_format=torch.contiguous_format)


def store_natural(base_2: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    """Turn base-2 LSE into the contract's in place, and copy it to `lse` where that lies apart."""
    if base_2 is None or lse is None:
        return
    base_2.masked_fill_(base_2 < NO_KEYS, -torch.inf).mul_(LN_2)
    if base_2 is not lse:
        lse.copy_(base_2)


def merge(kernels: Kernels, state: State, other: State) -> None:
    """Make `state` attention over both parts' keys.

    Merging goes head by head, so more heads than a block holds are merged as more tokens of fewer
    heads. LSE stays in base 2 and -5e4 stays as it is: the kernel subtracts maxima, and
    -inf - -inf would be NaN.
    """
    _, num_heads, head_dim = state[0].shape
    heads = _heads_in_a_block(num_heads, head_dim, state[0].element_size())
    if heads < num_heads:
        state, other = (
            (out.view(-1, heads, head_dim), lse.view(-1, heads)) for out, lse in (state, other)
        )
    kernels.merge_state_in_place(*state, *other)


def try_merge(
    kernels: Kernels, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    """Merge two states of [T, H, D], which compiles the kernel."""
    out = torch.zeros(2, *shape, dtype=dtype, device=device)
    lse = torch.zeros(2, *shape[:2], dtype=torch.float32, device=device)
    merge(kernels, (out[0], lse[0]), (out[1], lse[1]))


def _heads_in_a_block(num_heads: int, head_dim: int, itemsize: int) -> int:
    """The most heads that divide num_heads and fit into a block, head_dim / vec threads each."""
    vec = max(16 // itemsize, head_dim // 32)
    most = MAX_THREADS * vec // head_dim
    if num_heads <= most:
        return num_heads
    return max(n for n in range(1, num_heads + 1) if num_heads % n == 0 and n <= most)
