"""The contract, served by TensorRT-LLM's MHA kernels.

A step goes to one of two halves: decode and verify, which graphs may hold, and all other steps. The
platform decides once which kernels each half calls.

In the library K and V lie as tokens and then heads; a window is the number of keys before a token;
causality counts from the end of the keys; sinks are float32. The kernels are called without LSE.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch

from attnmux.core import InvalidInput
from attnmux.core.plugin import DecodeBuffers, KernelLibrary, LibraryBackend, Rows, rehearse
from attnmux.nvidia.flashinfer.shared import HINT
from attnmux.nvidia.kernel_rows import check_own_or_fp8
from attnmux.nvidia.trtllm import by_major, workspace
from attnmux.nvidia.trtllm_mha.decode import GeneratedDecode, XQADecode
from attnmux.nvidia.trtllm_mha.layers import Half, TRTLLMMHAKernels, TRTLLMMHALayer
from attnmux.nvidia.trtllm_mha.prefill import GeneratedPrefill, StagedPrefill

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

WORKSPACE_BYTES = 512 << 20
"""Other engines give TensorRT-LLM's MHA as much."""

TILED: tuple[type[Half], type[Half]] = (XQADecode, StagedPrefill)
GENERATED: tuple[type[Half], type[Half]] = (GeneratedDecode, GeneratedPrefill)


class TRTLLMMHABackend(
    LibraryBackend[TRTLLMMHAKernels, TRTLLMMHALayer, Half, DecodeBuffers],
):
    """MHA and GQA over pages of 16 to 128 tokens."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: TRTLLMMHAKernels
    ) -> None:
        """Raises InvalidInput for a platform, layers, a pool or options that no kernel serves."""
        check_own_or_fp8(context)
        super().__init__(context, options, kernels)
        decode, prefill = by_major(context, {9: TILED, 10: GENERATED, 12: TILED})
        layers = tuple(self._layers.values())
        scratch = workspace(context, options, default_bytes=WORKSPACE_BYTES)
        self._decode = decode(kernels, context, layers, scratch)
        self._prefill = prefill(kernels, context, layers, scratch)
        self._groups = tuple(dict.fromkeys(layer.group for layer in layers))

    def prepare_layer(self, layer: LayerSpec) -> TRTLLMMHALayer:
        return TRTLLMMHALayer.of(layer, self.context)

    def plan_step(self, batch: ForwardBatch, buffers: DecodeBuffers | None) -> Half:
        mode = batch.forward_mode
        half = self._decode if mode.is_decode() or mode.is_target_verify() else self._prefill
        half.plan(batch, buffers)
        return half

    def fill_step(self, step: Half, batch: ForwardBatch) -> None:
        step.fill(batch)

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> DecodeBuffers:
        return DecodeBuffers.of(self._groups, max_bs, self.context)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if call.has_own_kv:
            raise InvalidInput(
                "save_kv_cache", got=False, expected="True: the kernels read only the pool"
            )
        return super().forward_extend(call, batch)

    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        raise InvalidInput("lse", got="a tensor", expected="None: XQA and fmha_v2 give none")

    def attend(
        self, call: AttentionCall, layer: TRTLLMMHALayer, step: Half, batch: ForwardBatch
    ) -> torch.Tensor:
        out = call.out
        if out is None or not Rows.is_writable(out):
            out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
        step.attend(call.q, layer, out)
        return out


make = KernelLibrary(
    address="nvidia/trtllm_mha",
    backend=TRTLLMMHABackend,
    providers={
        "flashinfer": partial(
            KernelLibrary.imported, TRTLLMMHAKernels, "flashinfer.decode", "flashinfer.prefill"
        )
    },
    trial=rehearse,
    hint=HINT,
)
