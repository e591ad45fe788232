"""vllm-xpu-kernels' flash attention for MHA and GQA: one call of its function a layer, over pages.

A window counts keys before the query, inclusive. Sinks have the dtype of the queries. A cap and
slopes are taken and ignored. If each request has the same 2 to 16 queries, the function reads
each as a request of the decode kernel, which splits keys by the size of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import KernelLibrary, LibraryBackend, PagedLayer, rehearse
from attnmux.intel.packed_pages import Operands, PackedPagesBackend
from attnmux.intel.packed_steps import PackedStep
from attnmux.intel.vllm_xpu_shapes import PAGE_STEP, SHAPES

if TYPE_CHECKING:
    from attnmux.core import ForwardBatch, LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMXPUKernels:
    """Functions of `vllm_xpu_kernels.flash_attn_interface`."""

    flash_attn_varlen_func: Callable[..., torch.Tensor]
    """Attention of packed queries to pages. With one query a request it runs the kernel for decode,
    else that for prefill on requests of two or more and that for decode on the others."""


def load_kernels() -> VLLMXPUKernels:
    """Raises ImportError if the package is missing, or its library of operators does not load:
    the module itself imports all the same."""
    import_module("vllm_xpu_kernels._vllm_fa2_C")
    return KernelLibrary.imported(VLLMXPUKernels, "vllm_xpu_kernels.flash_attn_interface")


class VLLMXPUBackend(PackedPagesBackend[VLLMXPUKernels]):
    """MHA and GQA, prefill, decode and chains of drafts."""

    def check(self, layer: LayerSpec) -> None:
        _check_layer(layer)
        page_size = self.context.token_to_kv_pool.page_size
        if page_size % PAGE_STEP:
            got, expected = f"pages of {page_size} tokens", f"a multiple of {PAGE_STEP}"
            raise InvalidInput("token_to_kv_pool", got=got, expected=expected)

    def arguments(self, layer: LayerSpec) -> dict[str, Any]:
        dtype, window = self.context.token_to_kv_pool.dtype, layer.sliding_window_size
        return {
            "softmax_scale": layer.scaling,
            "causal": True,
            "window_size": [window, 0] if window >= 0 else None,
            "s_aux": layer.sinks_in(dtype),
            # None splits keys by what else is in the batch.
            "num_splits_kv": 1 if self.context.request.deterministic else None,
        }

    def plan_step(self, batch: ForwardBatch, buffers: None) -> PackedStep:
        if batch.forward_mode.is_target_verify() and self.context.request.deterministic:
            expected = "EXTEND or DECODE: keys of drafts are split by the size of the batch"
            raise InvalidInput("forward_mode", got="TARGET_VERIFY", expected=expected)
        return super().plan_step(batch, buffers)

    def launch(self, operands: Operands, layer: PagedLayer, step: PackedStep) -> None:
        # A longest request that no request reaches keeps the function off the decode kernel.
        deterministic = self.context.request.deterministic
        longest = (
            step.tables.max_seqlen_q
            if deterministic
            else LibraryBackend.filled(step.requests).longest
        )
        self.kernels.flash_attn_varlen_func(
            q=operands.q,
            k=operands.k,
            v=operands.v,
            max_seqlen_q=longest,
            cu_seqlens_q=operands.bounds,
            max_seqlen_k=step.tables.max_seqlen_k,
            seqused_k=operands.keys.lens,
            block_table=operands.keys.page_table,
            out=operands.out,
            **layer.arguments,
        )


def _check_layer(layer: LayerSpec) -> None:
    dim, group = layer.qk_head_dim, layer.tp_q_head_num // layer.tp_k_head_num
    needs_window, needs_sinks = layer.sliding_window_size >= 0, layer.sinks is not None
    has_kernel = layer.v_head_dim == dim and any(
        dim in shapes.head_dims
        and group <= shapes.most_group
        and shapes.windows >= needs_window
        and shapes.sinks >= needs_sinks
        for shapes in SHAPES
    )
    marks = {"with a window": needs_window, "with sinks": needs_sinks}
    shape = f"dims {dim} and {layer.v_head_dim}, {group} query heads a KV head"
    unserved = {
        f"kind {layer.kind}": layer.kind != "mha",
        " ".join([shape, *(mark for mark, is_set in marks.items() if is_set)]): not has_kernel,
        "is_causal=False": not layer.is_causal,
        "is_cross_attention": layer.is_cross_attention,
        "attention_chunk_size": layer.attention_chunk_size > 0,
        "logit_cap": layer.logit_cap > 0,
    }
    got = [name for name, is_set in unserved.items() if is_set]
    if got:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=" and ".join(got),
            expected="causal mha without a cap or chunks, of a shape that the library has kernels "
            f"for: {'; '.join(map(str, SHAPES))}",
        )


make = KernelLibrary(
    address="intel/vllm_xpu",
    backend=VLLMXPUBackend,
    providers={"vllm-xpu-kernels": load_kernels},
    trial=rehearse,
    hint="pip install vllm-xpu-kernels, with Intel's GPU driver and oneAPI's runtime",
)
