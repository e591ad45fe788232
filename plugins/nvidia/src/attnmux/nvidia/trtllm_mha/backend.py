"""The contract, served by TensorRT-LLM's MHA kernels.

A step goes to one of two halves: decode and verify, which graphs may hold, and the rest. Which
kernels are behind them is decided once, by the platform.

The library's conventions and ours: K and V lie as tokens and then heads; a window is the keys
before a token; causality counts from the end of the keys; sinks are float32. No kernel is asked for
LSE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.nvidia.pools import check_own_or_fp8
from attnmux.nvidia.rows import is_writable
from attnmux.nvidia.steps import prepared
from attnmux.nvidia.trtllm.workspace import workspace
from attnmux.nvidia.trtllm_mha.calls import LayerCall
from attnmux.nvidia.trtllm_mha.families import family_of

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.layer import LayerSpec
    from attnmux.nvidia.trtllm_mha.decode import Decode
    from attnmux.nvidia.trtllm_mha.kernels import Kernels
    from attnmux.nvidia.trtllm_mha.prefill import Prefill

WORKSPACE_BYTES = 512 << 20
"""What TensorRT-LLM's MHA is given by other engines."""


class TRTLLMMHABackend(AttentionBackend):
    """MHA and GQA over pages of 16 to 128 tokens."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: Kernels
    ) -> None:
        """Raises InvalidInput for a platform, layers, a pool or options that no kernel serves."""
        super().__init__(context, options)
        check_own_or_fp8(context)
        family = family_of(context.platform)
        self._calls = {layer.layer_id: LayerCall.of(layer, context) for layer in context.layers}
        calls = tuple(self._calls.values())
        scratch = workspace(context, options, default_bytes=WORKSPACE_BYTES)
        self._decode = family.decode(kernels, context, calls, scratch)
        self._prefill = family.prefill(kernels, context, calls, scratch)
        self._half: Decode | Prefill | None = None

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Decide the step's shape on the host; nothing is launched."""
        self._half = None
        mode = batch.forward_mode
        if mode is ForwardMode.IDLE:
            return
        half = self._decode if mode.is_decode() or mode.is_target_verify() else self._prefill
        half.plan(batch, in_capture)
        self._half = half

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Build page tables and lengths on the device: at replay from what the batch then holds."""
        if self._half is not None:
            self._half.fill(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called again, for graphs of another mode, it keeps what captured graphs point at."""
        self._decode.init_graphs(max_bs)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call.q, call.layer, call.out, call.lse)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if call.k is not None and not call.save_kv_cache:
            raise InvalidInput(
                "save_kv_cache", came=False, expected="True: keys are read from the pool"
            )
        return self._attend(call.q, call.layer, call.out, call.lse)

    def _attend(
        self,
        q: torch.Tensor,
        layer: LayerSpec,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        half = cast("Decode | Prefill", prepared(self._half))
        if lse is not None:
            raise InvalidInput("lse", came="a tensor", expected="None: XQA and fmha_v2 give none")
        if out is None or not is_writable(out):
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if not len(q):
            return out
        return half.attend(q, self._calls[layer.layer_id], out)
