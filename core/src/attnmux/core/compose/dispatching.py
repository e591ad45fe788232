"""The base of composites that send each step to one of their backends."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from attnmux.core.backend import AttentionBackend

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.call import AttentionCall
    from attnmux.core.layer import LayerSpec


class DispatchingBackend(AttentionBackend):
    """Sends each step to the backend that `serving` names. All share one context, so whatever one
    writes to the KV pool the others read."""

    @abstractmethod
    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        """The backend that a step goes to."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.serving(batch).init_forward_metadata(batch)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self.serving(batch).init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.serving(batch).init_forward_metadata_in_graph(batch)

    def save_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        k_rope: torch.Tensor | None = None,
    ) -> None:
        self.serving(batch).save_kv(k, v, layer, batch, k_rope=k_rope)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self.serving(batch).forward_decode(call, batch)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self.serving(batch).forward_extend(call, batch)
