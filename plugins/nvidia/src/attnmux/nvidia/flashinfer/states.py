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


def to_natural(lse: torch.Tensor) -> None:
    """Base-2 LSE to the contract's, in place."""
    lse.masked_fill_(lse < NO_KEYS, -torch.inf).mul_(LN_2)


def merge(kernels: Kernels, one: State, other: State) -> State:
    """Attention over both parts' keys.

    Merging goes head by head, so more heads than a block holds are merged as more tokens of fewer
    heads. LSE stays in base 2 and -5e4 stays as it is: the kernel subtracts maxima, and
    -inf - -inf would be NaN.
    """
    out = one[0]
    num_tokens, num_heads, head_dim = out.shape
    heads = _heads_in_a_block(num_heads, head_dim, out.element_size())
    if heads == num_heads:
        return kernels.merge_state(*one, *other)
    parts = [
        (values.view(-1, heads, head_dim), lse.view(-1, heads)) for values, lse in (one, other)
    ]
    merged, lse = kernels.merge_state(*parts[0], *parts[1])
    return merged.view(out.shape), lse.view(num_tokens, num_heads)


def _heads_in_a_block(num_heads: int, head_dim: int, itemsize: int) -> int:
    """The most heads that divide num_heads and fit into a block, head_dim / vec threads each."""
    vec = max(16 // itemsize, head_dim // 32)
    most = MAX_THREADS * vec // head_dim
    return max(n for n in range(1, num_heads + 1) if num_heads % n == 0 and n <= most)
