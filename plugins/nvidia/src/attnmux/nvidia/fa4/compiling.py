"""Kernels are compiled when they are first called: the smallest call of each layer does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from attnmux.core.context import BackendContext
from attnmux.core.dtypes import torch_dtype
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.fa4.calls import LayerCall
from attnmux.nvidia.fa4.kernels import Kernels
from attnmux.nvidia.trial import compiling

HINT = (
    "flash_attn.cute compiles its kernels when they are first called, through nvidia-cutlass-dsl "
    "and quack-kernels of the releases that it was made for; pip install 'attnmux-nvidia[fa4]'"
)


def compile_kernels(calls: Iterable[LayerCall], kernels: Kernels, context: BackendContext) -> None:
    """Attend to one key in each way that a step may ask of a layer, and wait for it.

    Layers in the pool attend to the reserved page, others to K and V of the call.
    Raises BackendFailed where a kernel does not compile or does not run.
    """
    distinct = {_compiled_for(call): call for call in calls}
    with compiling("nvidia/fa4", context.device, HINT):
        for call in distinct.values():
            for arguments in _tiny_calls(call, context):
                kernels.flash_attn_varlen_func(**arguments, **call.arguments)


def _compiled_for(call: LayerCall) -> tuple[object, ...]:
    """What the library's key of a kernel has of a layer."""
    layer = call.layer
    return (
        layer.kind,
        layer.qk_head_dim,
        layer.v_head_dim,
        layer.tp_q_head_num // layer.tp_k_head_num,
        layer.logit_cap,
        layer.sinks is None,
        call.cache is None,
    )


def _tiny_calls(call: LayerCall, context: BackendContext) -> Iterator[dict[str, Any]]:
    """With LSE and without, as the request has it; for short and for long steps, since on SM100 a
    kernel takes one tile of queries or two."""
    layer, device = call.layer, context.device
    bounds = torch.tensor([0, 1], dtype=torch.int32, device=device)
    lens, table = bounds[1:].clone(), bounds[:1].view(1, 1)
    given = _rows(layer, context)
    if call.cache is None:
        given.update(cu_seqlens_k=bounds, max_seqlen_k=1)
    else:
        given.update(k=call.cache.k, v=call.cache.v, seqused_k=lens, page_table=table)
    for with_lse in {False, context.request.lse}:
        for longest in (1, context.max_context_len):
            yield {
                **given,
                "cu_seqlens_q": bounds,
                "max_seqlen_q": longest,
                "return_lse": with_lse,
            }


def _rows(layer: LayerSpec, context: BackendContext) -> dict[str, Any]:
    dtype = torch_dtype(context.request.dtype or "bfloat16")

    def zeros(heads: int, dim: int) -> torch.Tensor:
        return torch.zeros(1, heads, dim, dtype=dtype, device=context.device)

    dim = layer.qk_rope_head_dim or layer.qk_head_dim
    rows = {
        "q": zeros(layer.tp_q_head_num, dim),
        "k": zeros(layer.tp_k_head_num, dim),
        "v": zeros(layer.tp_v_head_num, layer.v_head_dim),
    }
    if layer.kind == "mla":
        rows["qv"] = zeros(layer.tp_q_head_num, layer.v_head_dim)
    return rows
