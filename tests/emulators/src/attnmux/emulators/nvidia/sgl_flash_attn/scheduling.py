"""The schedule that a call computes before it attends, unless it is given one.

The library checks only its shape; a schedule of another step or of other arguments gives garbage.
Here it holds the lengths and a digest of the arguments, so that a wrong one can give NaN.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from attnmux.emulators.nvidia.sgl_flash_attn.attention import check, check_int32


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """[n] int32: up to four vectors of the batch, each of whole fours, and a counter that is 0.

    Raises NotImplementedError for packed queries: the library splits by how many there are, and
    is not told here.
    """
    unserved = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k, pack_gqa)
    if any(argument is not None for argument in unserved) or max_seqlen_k_new or sm_margin:
        raise NotImplementedError("the emulator knows schedules of batched queries alone")
    check_int32("seqused_k", cache_seqlens)
    check(batch_size > 0, "CUDA error: invalid configuration argument: no block to launch")
    check(cache_seqlens.shape == (batch_size,), "seqused_k must have shape (batch_size)")
    is_causal, is_local = _masking(
        causal, window_size, attention_chunk, max_seqlen_q, max_seqlen_k, headdim, page_size
    )
    rows = -(-batch_size // 4) * 4
    # The splits and the blocks of queries; the batches' order; the heads that share the L2 cache.
    vectors = 2 + (not is_local) + (is_causal or is_local)
    made = torch.zeros(vectors * rows + 1, dtype=torch.int32, device=cache_seqlens.device)
    made[:batch_size].copy_(cache_seqlens)
    said = (
        *(batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim),
        *(qkv_dtype, headdim if headdim_v is None else headdim_v, page_size),
        *(is_causal, is_local, tuple(window_size), attention_chunk, has_softcap, num_splits),
    )
    made[rows : 2 * rows].fill_(zlib.crc32(repr(said).encode()) >> 1)
    return made


def is_of_call(given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """0-dim bool: whether a schedule is the one that the call would compute.

    Raises RuntimeError for what the library refuses: another dtype or shape.
    """
    check(given.shape == expected.shape, f"scheduler_metadata must have shape {expected.shape}")
    check(given.is_contiguous(), "scheduler_metadata must be contiguous")
    check(given.dtype == torch.int32, "scheduler_metadata must have dtype int32")
    return (given == expected).all()


def _masking(
    causal: bool,
    window_size: Sequence[int],
    chunk: int,
    seqlen_q: int,
    seqlen_k: int,
    headdim: int,
    page_size: int | None,
) -> tuple[bool, bool]:
    """Whether the kernel is the causal one, or the one of windows and chunks."""
    left = -1 if window_size[0] >= seqlen_k - 1 else window_size[0]
    right = -1 if window_size[1] >= seqlen_q - 1 else window_size[1]
    if seqlen_q == 1 and left == right == -1 and not chunk:
        # Dims up to 128 have smaller blocks of keys when causal, which suits pages.
        causal = causal and 64 < headdim <= 128 and page_size is not None
    if causal:
        right = 0
    is_causal = left < 0 and right == 0 and not chunk
    return is_causal, (left >= 0 or right >= 0 or chunk > 0) and not is_causal
