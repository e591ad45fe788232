"""One backend for decode steps of some batch sizes, another for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardMode
from attnmux.core.compose.dispatching import DispatchingBackend
from attnmux.core.errors import InvalidInput

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sizes:
    """Batch sizes that a backend decodes."""

    least: int
    most: int | None
    """None: there is no largest."""
    backend: AttentionBackend

    def hold(self, batch_size: int) -> bool:
        return self.least <= batch_size and (self.most is None or batch_size <= self.most)


class BatchSizeAttnBackend(DispatchingBackend):
    """Sends a decode step to the backend of its batch size, every other step to `usual`.

    In a graph the batch is padded, at capture and at every replay, so that each graph has one
    backend.
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
        if not batch.forward_mode.is_decode():
            return self.usual
        held = (each.backend for each in self.sizes if each.hold(batch.batch_size))
        return next(held, self.usual)

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """Itself for decode steps, whose size decides; else who serves all of them."""
        return self if mode.is_decode_or_idle() else self.usual.select(mode)

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
