"""Common code of the backends over TensorRT-LLM's kernels in flashinfer: mainly their scratch
memory.

Its first 8 MiB count the blocks that are done with a request. They have to be 0 before a launch,
and a launch leaves them so: nothing else may write there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from attnmux.core import InvalidInput, KVPool
from attnmux.nvidia.kernel_rows import FP8

if TYPE_CHECKING:
    import torch

    from attnmux.core import BackendContext

T = TypeVar("T")

COUNTER_BYTES = 8 << 20
"""decode.py, `xqa_batch_decode_with_kv_cache`; trtllm_fmha_kernel_launcher.cu has as many."""
BLOCK_ROWS = 32
"""Rows, of a group's heads and then of drafts, that a block of XQA has in a verify step (mha.cu,
`rowsPerBlock`)."""
_MOST_PROCESSORS = 256
_TILE_ROWS = 128


def by_major(context: BackendContext, kernels: Mapping[int, T]) -> T:
    """The entry for the device, by the major number of its compute capability, as the library
    dispatches. Raises InvalidInput for a platform that no kernel runs on."""
    platform = context.platform
    major = platform.version[0] if platform.version else None
    if major is None or major not in kernels:
        *most, last = map(str, kernels)
        raise InvalidInput(
            "platform",
            got=platform.arch,
            expected=f"compute capability {', '.join(most)} or {last}",
        )
    return kernels[major]


def queries_like(q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Q unscaled in the dtype of an e4m3 cache, which saturates beyond 448; else Q itself."""
    return KVPool.quantise(q, FP8, None) if cache.dtype == FP8 else q


def workspace(
    context: BackendContext, options: Mapping[str, object], *, default_bytes: int
) -> torch.Tensor:
    """[bytes] uint8 of the context, zeros when it is made.

    Raises InvalidInput if the option `workspace_bytes` is too small for partial results: one
    row of output in float32, with its maximum and sum, for each row of a tile of each processor
    (kernelParams.h, `ptrPartialO`). XQA's rows take less, but a processor has as many as a group
    has of all drafts, in blocks of 32 (mha.cu, `nbTokenBlocksPerGrp`).
    """
    nbytes = cast("int", options.get("workspace_bytes", 0)) or default_bytes
    drafts = context.request.spec_draft_tokens or 1
    blocks = (
        -(-drafts * (layer.tp_q_head_num // layer.tp_k_head_num) // BLOCK_ROWS)
        for layer in context.layers
        if layer.kind == "mha"
    )
    rows = max([_TILE_ROWS, *(block * BLOCK_ROWS for block in blocks)])
    widest = max(layer.v_head_dim for layer in context.layers)
    processors = context.platform.core_count or _MOST_PROCESSORS
    least = COUNTER_BYTES + processors * rows * (widest * 4 + 8)
    if nbytes < least:
        raise InvalidInput(
            "workspace_bytes",
            got=f"{nbytes}, {least - nbytes} too few",
            expected=f"{least} or more, or 0 for {default_bytes}",
        )
    return context.workspace.get("trtllm", nbytes, zeroed=True)
