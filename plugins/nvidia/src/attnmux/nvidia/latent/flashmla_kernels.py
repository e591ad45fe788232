"""FlashMLA's functions, as sgl-flash-mla, sglang-kernel and vLLM carry them.

vLLM's operators are those of its own build (vllm/third_party/flashmla and csrc of vLLM 0.33). For
16-bit caches the first call of a step makes its schedule, as upstream FlashMLA does: the next
layers get it. For e4m3 a function makes it ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import Any

import torch

from attnmux.core.plugin import topk_slots
from attnmux.nvidia.vllm_files import load_operators

Operator = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashMLAKernels:
    """The library's functions for dense decode."""

    flash_mla_with_kvcache: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """Attention over a paged cache, with the library's own signature."""
    schedule: Callable[[torch.Tensor, int, bool], Sequence[torch.Tensor]]
    """(lengths [B] int32, queries times heads of a request, whether Q and cache are e4m3): which
    keys each thread block takes, [parts, 8] int32, and where the parts of each request begin,
    [B + 1] int32. One launch that reads the lengths on the device; only parts depends on the
    device, and it falls as there are more queries. Nothing, if the first call of a step makes the
    schedule."""
    schedule_arguments: Callable[..., dict[str, Any]]
    """The arguments of `flash_mla_with_kvcache` that carry what `schedule` made."""
    constants: Mapping[str, Any]
    """Its arguments that never change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NSAKernels:
    """The library's function for picked keys, and the lookup of their slots."""

    flash_mla_sparse_fwd: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    """(q, kv, indices, sm_scale, d_v, …): attention of each token over rows of kv of its own."""
    constants: Mapping[str, Any]
    """Its arguments that never change."""
    topk_slots: Callable[..., torch.Tensor] = topk_slots
    """Makes its indices of an indexer's picks, as `attnmux.core.topk_slots`."""


def dense_from_flash_mla(library: Any) -> FlashMLAKernels:  # noqa: ANN401  # a module
    """`flash_mla`, of sgl-flash-mla: its legacy half decodes densely.

    An object carries the schedule, which the first call would make. Made ahead, it is one launch a
    step, apart from the layers.
    """

    def schedule(lens: torch.Tensor, num_rows: int, is_fp8: bool) -> Sequence[torch.Tensor]:
        tensors: Sequence[torch.Tensor] = library.get_mla_decoding_metadata(
            lens, num_rows, 1, is_fp8_kvcache=is_fp8, use_legacy=True
        )
        return tensors

    def arguments(tiles: torch.Tensor, splits: torch.Tensor) -> dict[str, Any]:
        metadata, _ = library.get_mla_metadata()
        metadata.tile_scheduler_metadata = tiles
        metadata.num_splits = splits
        return {"tile_scheduler_metadata": metadata}

    return FlashMLAKernels(
        flash_mla_with_kvcache=library.flash_mla_with_kvcache,
        schedule=schedule,
        schedule_arguments=arguments,
        constants=MappingProxyType({"use_legacy": True}),
    )


def dense_from_sgl_kernel(library: Any) -> FlashMLAKernels:  # noqa: ANN401  # a module
    """`sgl_kernel.flash_mla`, of sglang-kernel: the same kernels, other names."""

    def schedule(lens: torch.Tensor, num_rows: int, is_fp8: bool) -> Sequence[torch.Tensor]:
        tensors: Sequence[torch.Tensor] = library.get_mla_metadata(
            lens, num_rows, 1, is_fp8_kvcache=is_fp8
        )
        return tensors

    def arguments(tiles: torch.Tensor, splits: torch.Tensor) -> dict[str, Any]:
        return {"tile_scheduler_metadata": tiles, "num_splits": splits}

    return FlashMLAKernels(
        flash_mla_with_kvcache=library.flash_mla_with_kvcache,
        schedule=schedule,
        schedule_arguments=arguments,
        constants=MappingProxyType({}),
    )


def sparse_from_flash_mla(library: Any) -> NSAKernels:  # noqa: ANN401  # a module
    """`flash_mla`, of sgl-flash-mla: its legacy half reads rows of 576."""
    return NSAKernels(
        flash_mla_sparse_fwd=library.flash_mla_sparse_fwd,
        constants=MappingProxyType({"use_legacy": True}),
    )


def sparse_from_sgl_kernel(library: Any) -> NSAKernels:  # noqa: ANN401  # a module
    """`sgl_kernel.flash_mla`, of sglang-kernel."""
    return NSAKernels(
        flash_mla_sparse_fwd=library.flash_mla_sparse_fwd, constants=MappingProxyType({})
    )


@dataclass(slots=True, eq=False)
class Schedule:
    """The schedule that a step's layers share. Empty until it is made."""

    tiles: torch.Tensor | None = None
    splits: torch.Tensor | None = None


def dense_of_vllm(
    dense_decode: Operator, decode_fp8: Operator, schedule_fp8: Operator
) -> FlashMLAKernels:
    """The kernels of vLLM's operators `dense_decode_fwd`, `fwd_kvcache_mla_fp8` and
    `get_mla_decoding_metadata_dense_fp8`."""

    def schedule(lens: torch.Tensor, num_rows: int, is_fp8: bool) -> Sequence[torch.Tensor]:
        return tuple(schedule_fp8(lens, num_rows, 1)) if is_fp8 else ()

    def arguments(*tensors: torch.Tensor) -> dict[str, Any]:
        return {"schedule": Schedule(*tensors)}

    def decode(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        block_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        head_dim_v: int,
        *,
        schedule: Schedule,
        softmax_scale: float,
        causal: bool,
        is_fp8_kvcache: bool,
        descale_q: torch.Tensor | None = None,
        descale_k: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        operands = (q, k_cache, head_dim_v, cache_seqlens, block_table, softmax_scale, causal)
        planned = schedule.tiles, schedule.splits
        if is_fp8_kvcache:
            out, lse = decode_fp8(*operands, *planned, descale_q, descale_k)
            return out, lse
        out, lse, schedule.tiles, schedule.splits = dense_decode(*operands, *planned, None)
        return out, lse

    return FlashMLAKernels(
        flash_mla_with_kvcache=decode,
        schedule=schedule,
        schedule_arguments=arguments,
        constants=MappingProxyType({}),
    )


def sparse_of_vllm(sparse_prefill: Operator) -> NSAKernels:
    """The kernel of vLLM's operator `sparse_prefill_fwd`."""

    def attend(
        q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        out, most, lse = sparse_prefill(q, kv, indices, sm_scale, d_v, None, None, None)
        return out, most, lse

    return NSAKernels(flash_mla_sparse_fwd=attend, constants=MappingProxyType({}))


def dense_from_vllm() -> FlashMLAKernels:
    """vLLM's build. Raises ImportError if vLLM is not installed or has none."""
    operators = load_operators("_flashmla_C", "dense_decode_fwd", "_flashmla_C")
    of_fp8 = load_operators("_flashmla_extension_C", "fwd_kvcache_mla_fp8", "_flashmla_extension_C")
    return dense_of_vllm(
        operators.dense_decode_fwd.default,
        of_fp8.fwd_kvcache_mla_fp8.default,
        of_fp8.get_mla_decoding_metadata_dense_fp8.default,
    )


def sparse_from_vllm() -> NSAKernels:
    """vLLM's build. Raises ImportError if vLLM is not installed or has none."""
    operators = load_operators("_flashmla_C", "sparse_prefill_fwd", "_flashmla_C")
    return sparse_of_vllm(operators.sparse_prefill_fwd.default)


DENSE: Mapping[str, Callable[[], FlashMLAKernels]] = {
    "flash_mla": lambda: dense_from_flash_mla(import_module("flash_mla")),
    "sgl_kernel.flash_mla": lambda: dense_from_sgl_kernel(import_module("sgl_kernel.flash_mla")),
    "vllm": dense_from_vllm,
}
"""Providers of `FlashMLAKernels`. The first that is installed provides them."""
SPARSE: Mapping[str, Callable[[], NSAKernels]] = {
    "flash_mla": lambda: sparse_from_flash_mla(import_module("flash_mla")),
    "sgl_kernel.flash_mla": lambda: sparse_from_sgl_kernel(import_module("sgl_kernel.flash_mla")),
    "vllm": sparse_from_vllm,
}
"""Providers of `NSAKernels`."""
