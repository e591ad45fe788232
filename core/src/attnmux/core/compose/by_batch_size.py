"""One backend for decode steps of some batch sizes, another for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardMode
from attnmux.core.errors import InvalidInput

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.layer import LayerSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sizes:
    """Batch sizes that a backend decodes."""

    least: int
    most: int | None
    """None: there is no largest."""
    backend: AttentionBackend

    def hold(self, batch_size: int) -> bool:
        return self.least <= batch_size and (self.most is None or batch_size <= self.most)


class BatchSizeAttnBackend(AttentionBackend):
    """Sends a decode step to the backend of its batch size, every other step to `usual`.

    In a graph the batch is padded, at capture and at every replay, so that each graph has one
    backend. All share the context, so whatever one writes to the KV pool the others read.
    """

    def __init__(self, *, usual: AttentionBackend, sizes: Sequence[Sizes]) -> None:
        """Raises InvalidInput for backends of different contexts, for ranges that overlap, and
        for backends whose padding rows differ in length: one graph runner pads for all of them."""
        super().__init__(usual.context)
        self.usual = usual
        self.sizes = tuple(sorted(sizes, key=lambda each: each.least))
        fill = usual.get_cuda_graph_seq_len_fill_value()
        end: int | None = 0
        for each in self.sizes:
            if each.backend.context is not usual.context:
                came, expected = "a backend of another context", "that of usual, whose pool it uses"
                raise InvalidInput("sizes", came=came, expected=expected)
            if end is None or each.least <= end or (each.most or each.least) < each.least:
                came = f"{each.least} to {each.most} behind {end}"
                raise InvalidInput("sizes", came=came, expected="ranges that do not overlap")
            end = each.most
            own = each.backend.get_cuda_graph_seq_len_fill_value()
            if own != fill:
                expected = f"{fill} as `seq_lens` of a padding row, as usual has"
                raise InvalidInput("sizes", came=str(own), expected=expected)

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        """The backend that a step goes to."""
        if not batch.forward_mode.is_decode():
            return self.usual
        held = (each.backend for each in self.sizes if each.hold(batch.batch_size))
        return next(held, self.usual)

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """Itself for decode steps, whose size decides; else who serves all of them."""
        return self if mode.is_decode_or_idle() else self.usual.select(mode)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.serving(batch).init_forward_metadata(batch)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self.serving(batch).init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        self.serving(batch).init_forward_metadata_in_graph(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Each backend gets room for the sizes that it serves, `usual` for all."""
        self.usual.init_cuda_graph_state(max_bs, max_num_tokens)
        for each in self.sizes:
            if each.least <= max_bs:
                largest = max_bs if each.most is None else min(each.most, max_bs)
                tokens = max_num_tokens * largest // max_bs
                each.backend.init_cuda_graph_state(largest, tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """That of all of them."""
        return self.usual.get_cuda_graph_seq_len_fill_value()

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
        return self.usual.forward_extend(
            q, k, v, layer, batch, save_kv_cache, q_rope=q_rope, k_rope=k_rope, out=out, lse=lse
        )
