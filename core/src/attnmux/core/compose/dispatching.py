"""What backends made of backends do alike: each step goes to one of them."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import torch

from attnmux.core.backend import AttentionBackend

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
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

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.serving(batch).forward_decode(
            q, k, v, layer, batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope, out=out, lse=lse
        )

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.serving(batch).forward_extend(
            q, k, v, layer, batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope, out=out, lse=lse
        )
