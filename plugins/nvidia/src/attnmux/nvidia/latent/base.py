"""The base of the backends that only decode layers of MLA."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

from attnmux.core import ForwardMode, GraphUnsupported, InvalidInput
from attnmux.core.plugin import DecodeBuffers, DecodeStep, KeyGroup, LibraryBackend
from attnmux.nvidia.kernel_rows import latent_layers

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch

K = TypeVar("K")
L = TypeVar("L")
S = TypeVar("S", bound=DecodeStep)
B = TypeVar("B", bound=DecodeBuffers)


class LatentDecodeBackend(LibraryBackend[K, L, S, B]):
    """The base of backends that decode, verify or draft over latents, and never prefill."""

    modes: ClassVar[tuple[ForwardMode, ...]]
    """The steps that the kernels serve."""

    def __init__(self, context: BackendContext, options: Mapping[str, object], kernels: K) -> None:
        """Raises InvalidInput for options, layers and pools that the kernels do not serve."""
        layers = latent_layers(context)
        super().__init__(context, options, kernels, layers)
        self._groups = tuple(dict.fromkeys(KeyGroup.of(layer, context) for layer in layers))

    @abstractmethod
    def plan_decode(self, batch: ForwardBatch, buffers: B | None) -> S:
        """Like `plan_step`, for a step of one of `modes`."""

    def plan_step(self, batch: ForwardBatch, buffers: B | None) -> S:
        mode = batch.forward_mode
        if mode not in self.modes:
            raise InvalidInput(
                "forward_mode",
                got=mode.name,
                expected=f"{' or '.join(each.name for each in self.modes)}: other steps are for "
                "the backends of their phases",
            )
        if buffers is not None and mode.is_draft_extend():
            raise GraphUnsupported(
                "graphs hold steps with the same number of new tokens for every request: run "
                "DRAFT_EXTEND eagerly"
            )
        return self.plan_decode(batch, buffers)

    def fill_step(self, step: S, batch: ForwardBatch) -> None:
        step.fill(batch, self._groups, self.context)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if call.has_own_kv:
            raise InvalidInput(
                "save_kv_cache", got=False, expected="True: the kernels read only the pool"
            )
        return super().forward_extend(call, batch)
