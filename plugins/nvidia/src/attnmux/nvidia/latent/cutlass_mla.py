"""CUTLASS MLA: one call of the library for each layer, over the pool's own pages.

The library takes one query a request, its latent and its rotary part apart, and gives no LSE. Rows
of the page table are contiguous. It leaves the output of a request without keys unwritten, and
divides by 0 if it merges parts: that request is given one key, and its output is replaced. It
allocates its output; its scratch memory is ours, need not be zeroed, and its size is not checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from attnmux.core import ForwardMode, GraphUnsupported, InvalidInput
from attnmux.core.plugin import (
    DecodeBuffers,
    DecodeStep,
    KernelLibrary,
    KeyGroup,
    LatentRows,
    LibraryBackend,
    Rows,
    rehearse,
)
from attnmux.nvidia.latent.base import LatentDecodeBackend
from attnmux.nvidia.vllm_files import load_operators

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

PAGE = 128
"""Tokens of a page: a tile of the kernel's, so that a table may have any number of columns."""
MOST_HEADS = 128
"""Query heads that the kernel computes; the library pads fewer to these."""
MOST_SPLITS = 256
"""Parts of one request that the kernel merges (sm100_mla.hpp)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutlassMLAKernels:
    """Functions of `sgl_kernel`; see `cutlass_of_vllm` for vLLM's."""

    cutlass_mla_decode: Callable[..., torch.Tensor]
    """Attention of one query a request over a paged cache."""
    cutlass_mla_get_workspace_size: Callable[..., int]
    """Bytes of the scratch memory."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CutlassMLALayer:
    """A layer's arguments that no step changes."""

    group: KeyGroup
    cache: torch.Tensor
    """[pages, 128, 576], the pool's memory."""
    scale: float


@dataclass(kw_only=True, slots=True, eq=False)
class CutlassMLABuffers(DecodeBuffers):
    """Fixed tensors that graphs replay with."""

    workspace: torch.Tensor
    """A captured launch has its address, so it stays when the shared workspace grows."""


@dataclass(kw_only=True, slots=True, eq=False)
class CutlassMLAStep(DecodeStep):
    """A decode step."""

    workspace: torch.Tensor | None = None
    """None for a step without requests."""


class CutlassMLABackend(
    LatentDecodeBackend[CutlassMLAKernels, CutlassMLALayer, CutlassMLAStep, CutlassMLABuffers]
):
    """Decoding of MLA on SM100; prefill, verification and drafts are another backend's."""

    modes = (ForwardMode.DECODE,)

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: CutlassMLAKernels
    ) -> None:
        """Raises InvalidInput for options, layers and pools that the kernel does not serve."""
        super().__init__(context, options, kernels)
        self._num_kv_splits = _read_num_kv_splits(options)

    def prepare_layer(self, layer: LayerSpec) -> CutlassMLALayer:
        self.context.check_page_size(PAGE)
        self.context.check_sixteen_bits()
        if layer.tp_q_head_num > MOST_HEADS:
            raise InvalidInput(
                f"layer {layer.layer_id}",
                got=f"{layer.tp_q_head_num} query heads",
                expected=f"at most {MOST_HEADS}",
            )
        return CutlassMLALayer(
            group=KeyGroup.of(layer, self.context),
            cache=self.context.latent_pages(layer, PAGE).squeeze(2),
            scale=layer.scaling,
        )

    def plan_decode(self, batch: ForwardBatch, buffers: CutlassMLABuffers | None) -> CutlassMLAStep:
        step = CutlassMLAStep.of(batch, self.context, buffers)
        if buffers is not None:
            step.workspace = buffers.workspace
        elif batch.batch_size:
            step.workspace = self._workspace(step.tables.max_seqlen_k, batch.batch_size)
        return step

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> CutlassMLABuffers:
        if self._num_kv_splits < 1:
            raise GraphUnsupported(
                "a graph cannot hold splits that the kernel chooses: set num_kv_splits to 1 or more"
            )
        workspace = self._workspace(self.context.max_context_len, max_bs)
        return CutlassMLABuffers.of(self._groups, max_bs, self.context, workspace=workspace)

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        raise InvalidInput("lse", got="a tensor", expected="None: the library gives no LSE")

    def attend(
        self,
        call: AttentionCall,
        layer: CutlassMLALayer,
        step: CutlassMLAStep,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        keys = LibraryBackend.filled(step.keys)[layer.group]
        result = self.kernels.cutlass_mla_decode(
            Rows.aligned(call.q),
            Rows.aligned(call.rotary_queries()),
            layer.cache,
            keys.lens,
            keys.page_table,
            step.workspace,
            layer.scale,
            self._num_kv_splits,
        )
        step.replace_empty(result)
        return result

    def _workspace(self, max_seqlen_k: int, batch_size: int) -> torch.Tensor:
        """The kernel counts the keys that the table has room for, not those that there are."""
        room = -(-max_seqlen_k // PAGE) * PAGE
        nbytes = self.kernels.cutlass_mla_get_workspace_size(
            room, batch_size, num_kv_splits=self._num_kv_splits
        )
        return self.context.workspace.get("cutlass_mla", nbytes)


def _read_num_kv_splits(options: Mapping[str, object]) -> int:
    splits = options.get("num_kv_splits", 1)
    if not isinstance(splits, int) or not (splits == -1 or 1 <= splits <= MOST_SPLITS):
        raise InvalidInput(
            "num_kv_splits",
            got=splits,
            expected=f"1 to {MOST_SPLITS}, or -1 to let the kernel choose",
        )
    return splits


def cutlass_of_vllm(
    decode: Callable[..., None], get_workspace_size: Callable[..., int]
) -> CutlassMLAKernels:
    """The kernels of vLLM's operators `sm100_cutlass_mla_decode` and
    `sm100_cutlass_mla_get_workspace_size`, which want 128 heads."""

    def padded(q: torch.Tensor) -> torch.Tensor:
        return q if q.shape[1] == MOST_HEADS else pad(q, (0, 0, 0, MOST_HEADS - q.shape[1]))

    def cutlass_mla_decode(
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        workspace: torch.Tensor,
        sm_scale: float,
        num_kv_splits: int,
    ) -> torch.Tensor:
        out = q_nope.new_empty((len(q_nope), MOST_HEADS, LatentRows.LATENT_DIM))
        no_lse = q_nope.new_empty(0, dtype=torch.float32)
        operands = (padded(q_nope), padded(q_pe), cache, seq_lens, page_table, workspace)
        decode(out, no_lse, *operands, sm_scale, num_kv_splits)
        return out[:, : q_nope.shape[1]]

    def cutlass_mla_get_workspace_size(
        max_seq_len: int, num_batches: int, *, num_kv_splits: int
    ) -> int:
        return get_workspace_size(max_seq_len, num_batches, 0, num_kv_splits)

    return CutlassMLAKernels(
        cutlass_mla_decode=cutlass_mla_decode,
        cutlass_mla_get_workspace_size=cutlass_mla_get_workspace_size,
    )


def from_vllm() -> CutlassMLAKernels:
    """vLLM's build. Raises ImportError if vLLM is not installed or has none."""
    operators = load_operators("_C", "sm100_cutlass_mla_decode", "_C_stable_libtorch")
    return cutlass_of_vllm(
        operators.sm100_cutlass_mla_decode.default,
        operators.sm100_cutlass_mla_get_workspace_size.default,
    )


make = KernelLibrary(
    address="nvidia/cutlass_mla",
    backend=CutlassMLABackend,
    providers={
        "vllm": from_vllm,
        "sgl_kernel": partial(KernelLibrary.imported, CutlassMLAKernels, "sgl_kernel"),
    },
    trial=rehearse,
)
