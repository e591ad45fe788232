"""The operators of torch-npu that the adapters call, and the common part of their calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from attnmux.ascend.graph_tasks import GraphTasks, NPUGraphTasks

MOST_REQUESTS = 4096
"""Lengths of a list (docs of `npu_fused_infer_attention_score_v2`, layout TND)."""
MASK_SIZE = 2048
"""Rows and columns of the mask that stands for causality."""
NO_MASK, CAUSAL = 0, 3
"""Values of `sparse_mode`: all keys, and causality from the end of each request's keys."""
INT32 = torch.iinfo(torch.int32).max
"""The numbers of a paged cache that a query of one token reads: the docs give no more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NPUKernels:
    """Operators that torch-npu registers. Lengths are lists or tensors on the host."""

    fused_infer_attention_score: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """`npu_fused_infer_attention_score_v2`: attention of packed queries to pages or to packed keys.
    It returns the result and its LSE, a natural logarithm [T, Hq, 1], or a dummy."""
    paged_attention_mla: Callable[..., None]
    """`_npu_paged_attention_mla`: attention of one query a request to pages whose rows hold the
    latent and the rotary part. It writes the result to a tensor of the caller."""
    ring_mla: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """`npu_ring_mla`: attention of packed queries of 128 + 64 dims to packed keys, added to a
    result so far if one is given. It returns the result [T, H, 128] and its LSE, a natural
    logarithm [H, T]."""
    graph_tasks: GraphTasks
    """How calls of the first are captured in graphs."""


def load_kernels() -> NPUKernels:
    """Import torch-npu, which registers its operators.

    All except the first are NNAL's, which torch-npu loads when the operator is called.
    Raises ImportError if torch-npu or CANN is missing, OSError if a library does not load,
    and AttributeError if torch-npu lacks an operator.
    """
    torch_npu = import_module("torch_npu")
    return NPUKernels(
        fused_infer_attention_score=torch_npu.npu_fused_infer_attention_score_v2,
        paged_attention_mla=torch_npu._npu_paged_attention_mla,
        ring_mla=torch_npu.atb.npu_ring_mla,
        graph_tasks=NPUGraphTasks(),
    )


def causal_mask(device: torch.device) -> torch.Tensor:
    """[2048, 2048] bool, True where a key is masked: the operator reads no other mask for
    `CAUSAL`, whatever the lengths."""
    ones = torch.ones((MASK_SIZE, MASK_SIZE), dtype=torch.bool, device=device)
    return ones.triu(1)
