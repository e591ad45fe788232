"""Compiles a backend's kernels before the first request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from triton import AsyncCompileMode

from attnmux.core import AttentionCall, ForwardBatch, ForwardMode, torch_dtype
from attnmux.core.plugin import elapsed_shown
from attnmux.core.plugin import rehearse as rehearse_phases
from attnmux.triton.attention.wide_tiles import LEAST_ROWS
from attnmux.triton.launches.bound_kernel import RehearsedLaunch, current, failure_of

if TYPE_CHECKING:
    from attnmux.core import BackendContext, LayerSpec
    from attnmux.triton.attention.backend import TritonBackend

SHARED_KEYS = 4096
"""Keys of a request with few new tokens whose tiles several programs share, on a GPU with more
than 64 units."""


def rehearse(backend: TritonBackend, context: BackendContext) -> None:
    """Take every layer's decode and extend steps, at each batch size that plans are compiled for,
    and a small step of each phase of the request, with drafts and LSE where it has them.

    Leaves out masks and items of some requests alone.
    """
    is_encoder = not context.layers[0].is_causal
    modes = (ForwardMode.EXTEND,) if is_encoder else (ForwardMode.DECODE, ForwardMode.EXTEND)
    for mode in modes:
        for size in _batch_sizes(context.max_batch_size):
            batch = _batch(mode, size, context)
            _prepare(backend, batch)
            # Only decode's merge of partial results depends on the batch size.
            if mode is ForwardMode.DECODE:
                _call_all(backend, batch, context)
    one = _batch(ForwardMode.EXTEND, 1, context)
    _rehearse_tiles(backend, one, context)
    # Without lengths on the host, a tile is split as in the longest context
    unknown = replace(one, seq_lens_cpu=None)
    _prepare(backend, unknown)
    _call_all(backend, unknown, context)
    if backend.widens and not is_encoder:
        new = min(LEAST_ROWS, context.max_context_len)
        _rehearse_tiles(backend, _batch(ForwardMode.EXTEND, 1, context, new), context)
        # Programs share the keys of a tile behind a prefix
        cached = max(min(SHARED_KEYS, context.max_context_len) - new, 0)
        behind = _batch(ForwardMode.EXTEND, 1, context, new, cached)
        _prepare(backend, behind)
        _call_all(backend, behind, context)
    # Leaves no step prepared
    rehearse_phases(backend)


def _rehearse_tiles(backend: TritonBackend, batch: ForwardBatch, context: BackendContext) -> None:
    """Take an extend step with tall tiles, and with short ones."""
    _prepare(backend, batch)
    for short in (False, True):
        backend.force_tiles(short=short)
        _call_all(backend, batch, context)


def _prepare(backend: TritonBackend, batch: ForwardBatch) -> None:
    """Without the checks of a step's values, which are made up."""
    backend.init_forward_metadata_out_graph(batch)
    backend.init_forward_metadata_in_graph(batch)


def _call_all(backend: TritonBackend, batch: ForwardBatch, context: BackendContext) -> None:
    for layer in context.layers:
        _call(backend, layer, batch, context)


def _batch_sizes(most: int) -> list[int]:
    """The powers of 2 and `most`: plans are compiled for the next power of 2 of a batch size."""
    return sorted({most, *(1 << exponent for exponent in range(most.bit_length()))})


def _batch(
    mode: ForwardMode, size: int, context: BackendContext, new_tokens: int = 1, cached: int = 0
) -> ForwardBatch:
    """new_tokens of each request behind those that are cached, in the rows and slots that are
    reserved for padding."""

    def zeros(dtype: torch.dtype, count: int = size) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=context.device)

    has_encoder = any(layer.is_cross_attention for layer in context.layers)
    extends = mode is ForwardMode.EXTEND
    num_tokens = size * new_tokens
    new_lens = zeros(torch.int32) + new_tokens
    lens = new_lens + cached
    return ForwardBatch(
        forward_mode=mode,
        batch_size=size,
        req_pool_indices=zeros(torch.int64),
        seq_lens=lens,
        seq_lens_cpu=lens.cpu(),
        out_cache_loc=zeros(torch.int64, num_tokens),
        positions=zeros(torch.int64, num_tokens),
        extend_seq_lens=new_lens if extends else None,
        extend_seq_lens_cpu=new_lens.cpu() if extends else None,
        extend_prefix_lens=zeros(torch.int32) + cached if extends else None,
        extend_num_tokens=num_tokens if extends else None,
        encoder_lens=lens if has_encoder else None,
        encoder_out_cache_loc=zeros(torch.int64, num_tokens) if has_encoder else None,
    )


def _call(
    backend: TritonBackend, layer: LayerSpec, batch: ForwardBatch, context: BackendContext
) -> None:
    pool = context.token_to_kv_pool
    dtype = torch.bfloat16 if context.request.dtype is None else torch_dtype(context.request.dtype)

    def rows(heads: int, width: int) -> torch.Tensor:
        return torch.zeros((batch.num_tokens, heads, width), dtype=dtype, device=context.device)

    rope = layer.qk_rope_head_dim
    q = rows(layer.tp_q_head_num, layer.qk_head_dim - rope)
    k = rows(layer.tp_k_head_num, layer.qk_head_dim - rope)
    v = None if rope else rows(layer.tp_v_head_num, layer.v_head_dim)
    q_rope = rows(layer.tp_q_head_num, rope) if rope else None
    k_rope = rows(1, rope) if rope else None
    is_stored = layer.is_causal and layer.layer_id in pool.layer_ids
    if is_stored:
        backend.save_kv(k, v, layer, batch, k_rope=k_rope)
    call = AttentionCall(q, k, v, layer, is_stored, q_rope, k_rope)
    if not batch.forward_mode.is_decode():
        backend.forward_extend(call, batch)
    elif is_stored:
        backend.forward_decode(call, batch)


def compile_ahead(launches: Sequence[RehearsedLaunch], device: torch.device) -> None:
    """Compile and load all rehearsed launches, in threads; later calls launch them without binding.

    Triton keeps compiled kernels on disk, so that the next process only loads them.
    Raises BackendFailed for the first kernel that does not compile, or that needs more of the
    device than it has.
    """
    with (
        elapsed_shown(f"compiling or loading {len(launches)} launches of Triton's kernels"),
        current(device),
        ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as threads,
    ):
        here = _with_index(device)

        def load(launch: RehearsedLaunch, compiled: Any) -> None:  # noqa: ANN401  # no types of Triton's
            with current(here):  # the current device is a thread's own
                _load(launch, compiled)

        # Failures are raised below: an error in here would leave the mode on.
        with AsyncCompileMode(threads, ignore_errors=True):
            begun = [
                launch.bound.kernel.warmup(*launch.values, grid=(1,), **launch.bound.options)
                for launch in launches
            ]
        compiled = [_finished(*pair) for pair in zip(launches, begun, strict=True)]
        # Each once: a second thread would get a kernel that the first has only half loaded.
        each = {
            id(kernel): (launch, kernel) for launch, kernel in zip(launches, compiled, strict=True)
        }
        for _ in threads.map(lambda pair: load(*pair), each.values()):
            pass
    for launch, kernel in zip(launches, compiled, strict=True):
        launch.bound.keep(launch.key, kernel, launch.values, launch.tensors)


def _with_index(device: torch.device) -> torch.device:
    if device.index is not None or device.type == "cpu":
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _finished(launch: RehearsedLaunch, compiled: Any) -> Any:  # noqa: ANN401  # as above
    """compiled: a CompiledKernel, or one that will be."""
    try:
        return compiled.result() if hasattr(compiled, "result") else compiled
    except Exception as error:  # whatever a compiler raises
        raise failure_of(launch.bound.kernel, error) from error


def _load(launch: RehearsedLaunch, compiled: Any) -> None:  # noqa: ANN401  # as above
    try:
        # Indexing loads the kernel, and raises where the device has too little of something.
        compiled[1, 1, 1]
    except Exception as error:  # whatever a driver raises
        raise failure_of(launch.bound.kernel, error) from error
