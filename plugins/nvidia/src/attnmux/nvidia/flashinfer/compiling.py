"""Kernels are compiled when they are first planned: the smallest step of each phase does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from attnmux.core.batch import ForwardBatch, ForwardMode, MultiItem
from attnmux.core.context import BackendContext
from attnmux.core.spec import SpecInput
from attnmux.nvidia.trial import compiling

MODES = {
    "extend": ForwardMode.EXTEND,
    "decode": ForwardMode.DECODE,
    "verify": ForwardMode.TARGET_VERIFY,
    "draft": ForwardMode.DRAFT_EXTEND,
    "encoder": ForwardMode.EXTEND,
}

HINT = (
    "flashinfer compiles its kernels when they are first used: it needs ninja and, in CUDA_HOME or "
    "on PATH, the nvcc of a CUDA toolkit that fits the driver; pip install "
    "'attnmux-nvidia[flashinfer]' ninja"
)


def compile_kernels(
    address: str, context: BackendContext, try_step: Callable[[ForwardBatch], None]
) -> None:
    """Plan the smallest step of each phase of the request.

    Raises BackendFailed, for the backend of that address, where a kernel does not compile.
    """
    with compiling(address, context.device, HINT):
        for batch in tiny_batches(context):
            try_step(batch)


def tiny_batches(context: BackendContext) -> Iterator[ForwardBatch]:
    """One request with a token in the cache and a new one, in each phase of the request.

    It is row 0 of the request table, whose slots are padding's. Nothing is run.
    """
    for phase in context.request.phases:
        batch = _tiny_batch(context, MODES[phase], cached=0 if phase == "encoder" else 1)
        yield batch
        if phase == "extend" and context.request.multi_item:
            alone = MultiItem(prefix_lens=batch.seq_lens - 1, token_pos_in_items=batch.seq_lens * 0)
            yield replace(batch, multi_item=alone)


def _tiny_batch(context: BackendContext, mode: ForwardMode, cached: int) -> ForwardBatch:
    device = context.device
    one = torch.ones(1, dtype=torch.int32)
    prefix = one * cached
    lens = prefix if mode.is_target_verify() else prefix + one
    has_encoder = any(layer.is_cross_attention for layer in context.layers)
    spec_info = None
    if mode.is_target_verify():
        mask = None
        if context.request.custom_mask:
            mask = torch.ones(cached + 1, dtype=torch.bool, device=device)
        spec_info = SpecInput(draft_token_num=1, custom_mask=mask)
    nothing = torch.zeros(1, dtype=torch.int64, device=device)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=1,
        req_pool_indices=nothing,
        seq_lens=lens.to(device),
        seq_lens_cpu=lens,
        out_cache_loc=nothing,
        positions=nothing,
        extend_seq_lens=one.to(device),
        extend_seq_lens_cpu=one,
        extend_prefix_lens=prefix.to(device),
        extend_prefix_lens_cpu=prefix,
        extend_num_tokens=1,
        encoder_lens=one.to(device) if has_encoder else None,
        spec_info=spec_info,
    )
