"""One backend for prefill, another for decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardMode
from attnmux.core.compose.dispatching import DispatchingBackend
from attnmux.core.errors import InvalidInput

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch


class HybridAttnBackend(DispatchingBackend):
    """Sends each step to the backend of its phase.

    Decode steps go to `decode`; EXTEND and MIXED to `prefill`; TARGET_VERIFY and DRAFT_EXTEND to
    the one that the request's `speculative_attention_mode` names.
    """

    def __init__(self, *, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        """Raises InvalidInput for backends of different contexts."""
        if prefill.context is not decode.context:
            raise InvalidInput(
                "prefill",
                came="a backend of another context",
                expected="the context of decode, whose KV pool both use",
            )
        super().__init__(decode.context)
        self.prefill = prefill
        self.decode = decode
        mode = self.context.request.speculative_attention_mode
        self._speculative = decode if mode == "decode" else prefill

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """The child that serves steps of that mode."""
        if mode.is_decode_or_idle():
            return self.decode
        if mode.is_target_verify() or mode.is_draft_extend():
            return self._speculative
        return self.prefill

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        return self.select(batch.forward_mode)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Decode is always captured; the prefill backend only where it verifies drafts.

        A `GraphRunner` asks the child that `select` names, and nobody else.
        """
        self.decode.init_cuda_graph_state(max_bs, max_num_tokens)
        if self.context.request.spec_topk and self._speculative is self.prefill:
            self.prefill.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """That of decode steps; `select(mode)` knows that of others."""
        return self.decode.get_cuda_graph_seq_len_fill_value()
