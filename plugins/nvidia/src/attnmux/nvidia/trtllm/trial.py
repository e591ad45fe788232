"""The smallest step of each phase: it compiles the kernels, and shows whether they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch
from attnmux.core.context import BackendContext
from attnmux.core.dtypes import torch_dtype
from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.core.spec import SpecInput
from attnmux.nvidia.flashinfer.compiling import HINT, tiny_batches
from attnmux.nvidia.trial import compiling


def try_backend(address: str, backend: AttentionBackend) -> None:
    """Attend to the reserved page, for every kernel that the context's layers need, and wait.

    A phase that the backend refuses is another backend's: it is left out.
    Raises BackendFailed, for the backend of that address, with what the library said.
    """
    context = backend.context
    with compiling(address, context.device, HINT):
        for batch in _batches(context):
            _try_step(backend, batch)


def _try_step(backend: AttentionBackend, batch: ForwardBatch) -> None:
    context = backend.context
    dtype = torch_dtype(context.request.dtype or "bfloat16")
    try:
        backend.init_forward_metadata(batch)
    except InvalidInput:
        return
    for layer in _distinct(context):
        is_latent = layer.kind == "mla"
        shape = (batch.num_tokens, layer.tp_q_head_num)
        dim = layer.v_head_dim if is_latent else layer.qk_head_dim
        q = torch.zeros((*shape, dim), dtype=dtype, device=context.device)
        q_rope = q.new_zeros((*shape, layer.qk_rope_head_dim)) if is_latent else None
        try:
            backend.forward(q, None, None, layer, batch, q_rope=q_rope)
        except InvalidInput:
            return


def _distinct(context: BackendContext) -> list[LayerSpec]:
    """One layer of each kind that a kernel is compiled for. Expanded layers hold no keys."""
    pool = context.token_to_kv_pool
    found: dict[object, LayerSpec] = {}
    for layer in context.layers:
        if layer.layer_id in pool.layer_ids and (layer.kind == "mla") == context.request.latent:
            heads = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)
            found.setdefault((heads, layer.sliding_window_size >= 0), layer)
    return list(found.values())


def _batches(context: BackendContext) -> Iterator[ForwardBatch]:
    drafts = context.request.spec_draft_tokens or 1
    for batch in tiny_batches(context):
        yield _with_drafts(batch, drafts) if batch.forward_mode.is_target_verify() else batch


def _with_drafts(batch: ForwardBatch, drafts: int) -> ForwardBatch:
    """XQA has a kernel for each number of draft tokens."""
    lens = torch.full((1,), drafts, dtype=torch.int32)
    slots = batch.out_cache_loc.new_zeros(drafts)
    return replace(
        batch,
        out_cache_loc=slots,
        positions=slots,
        extend_seq_lens=lens.to(slots.device),
        extend_seq_lens_cpu=lens,
        extend_num_tokens=drafts,
        spec_info=SpecInput(draft_token_num=drafts),
    )
