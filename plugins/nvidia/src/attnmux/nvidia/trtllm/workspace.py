"""The scratch memory of the kernels.

Its first 8 MiB count the blocks that are done with a request. They have to be 0 before a launch,
and a launch leaves them so: nobody else may write there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput

COUNTER_BYTES = 8 << 20
"""decode.py, `xqa_batch_decode_with_kv_cache`; trtllm_fmha_kernel_launcher.cu has as many."""

_MOST_PROCESSORS = 256
_TILE_ROWS = 128

BLOCK_ROWS = 32
"""Rows, of a group's heads and then of drafts, that a block of XQA has in a verify step (mha.cu,
`rowsPerBlock`)."""


def workspace(
    context: BackendContext, options: Mapping[str, object], *, default_bytes: int
) -> torch.Tensor:
    """[bytes] uint8 of the context, zeros when it is made.

    Raises InvalidInput where the option `workspace_bytes` is too small for partial results: one
    row of output in float32, with its maximum and sum, for each row of a tile of each processor
    (kernelParams.h, `ptrPartialO`). XQA's rows take less, but a processor has as many as a group
    has of all drafts, in blocks of 32 (mha.cu, `nbTokenBlocksPerGrp`).
    """
    nbytes = cast("int", options.get("workspace_bytes", 0)) or default_bytes
    widest = max(layer.v_head_dim for layer in context.layers)
    processors = context.platform.core_count or _MOST_PROCESSORS
    least = COUNTER_BYTES + processors * _rows(context) * (widest * 4 + 8)
    if nbytes < least:
        raise InvalidInput(
            "workspace_bytes",
            came=f"{nbytes}, {least - nbytes} too few",
            expected=f"{least} or more, or 0 for {default_bytes}",
        )
    return context.workspace.get("trtllm", nbytes, zeroed=True)


def _rows(context: BackendContext) -> int:
    drafts = context.request.spec_draft_tokens or 1
    groups = (
        layer.tp_q_head_num // layer.tp_k_head_num
        for layer in context.layers
        if layer.kind == "mha"
    )
    blocks = (-(-drafts * group // BLOCK_ROWS) for group in groups)
    return max([_TILE_ROWS, *(block * BLOCK_ROWS for block in blocks)])
