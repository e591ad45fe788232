"""Layers that are a short convolution alone, on `sgl_kernel`'s causal convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from attnmux.core import InvalidInput
from attnmux.core.plugin import KernelLibrary, LinearAttentionBackend
from attnmux.nvidia.linear.causal_convolutions import CausalConvolutions, ConvKernels
from attnmux.nvidia.linear.rehearsal import rehearse_linear

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch
    from attnmux.core.plugin import ConvCall, LinearCall


class SglConvBackend(LinearAttentionBackend):
    """Layers of kind "conv": by the kernels with 2 to 4 taps, by plain operations with others."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: ConvKernels
    ) -> None:
        super().__init__(context, options)
        self._convolutions = CausalConvolutions(self.states, kernels)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        mode = batch.forward_mode
        if mode.is_extend() and not mode.is_target_verify():
            self._convolutions.prepare(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to allocate: a captured step's tensors belong to its graph."""

    def forward_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        self._convolutions.run(call, batch)

    def verify_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        self._convolutions.verify(call, batch)

    def forward_decode(self, call: LinearCall, batch: ForwardBatch) -> None:
        _refuse(call)

    def forward_extend(self, call: LinearCall, batch: ForwardBatch) -> None:
        _refuse(call)

    def forward_verify(self, call: LinearCall, batch: ForwardBatch) -> None:
        _refuse(call)


def _refuse(call: LinearCall) -> NoReturn:
    layer = call.layer
    raise InvalidInput(
        f"linear layer {layer.layer_id}", got=f"kind {layer.kind!r}", expected="kind 'conv'"
    )


make = KernelLibrary(
    address="nvidia/sgl_conv",
    backend=SglConvBackend,
    providers={"sgl_kernel": partial(KernelLibrary.imported, ConvKernels, "sgl_kernel")},
    trial=partial(rehearse_linear, kind="conv"),
)
