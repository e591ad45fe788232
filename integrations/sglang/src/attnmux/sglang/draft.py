"""Drafts of several steps: one backend for each, as SGLang's EAGLE workers call them."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode, build_inner_fb_view

from attnmux.core import InvalidInput
from attnmux.sglang.backend import AttnmuxAttnBackend


class AttnmuxMultiStepDraftBackend:
    """Step i of a draft sees the tokens of the steps before it, in the request's own row of the
    request table. SGLang calls each step's backend by its place in `attn_backends`."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any, *, topk: int, num_steps: int) -> None:  # noqa: ANN401  # SGLang's
        """runner: the draft model's ModelRunner. num_steps: --speculative-num-steps; the last
        step's tokens need no attention.

        Raises ValueError for a tree: its branches have no rows in the request table.
        """
        if topk > 1:
            refusal = InvalidInput(
                "--speculative-eagle-topk",
                got=topk,
                expected="1 if attnmux drafts: take another --speculative-draft-attention-"
                "backend for trees, which attnmux verifies",
            )
            raise ValueError(str(refusal))
        self.attn_backends = [
            AttnmuxAttnBackend(runner, draft_step=step) for step in range(num_steps - 1)
        ]
        self.attn_backend_list = self.attn_backends
        self.forward_metadata = None
        self.topk = topk
        self.speculative_num_steps = num_steps
        self.kv_index_translator = runner.kv_index_translator
        self.prefill_attention_backend_str: str | None = None
        self.decode_attention_backend_str: str | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:  # noqa: ANN401  # SGLang's
        view = _decoding(forward_batch)
        for backend in self.attn_backends:
            backend.init_forward_metadata(view)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:  # noqa: ANN401
        view = _decoding(forward_batch)
        for backend in self.attn_backends:
            backend.init_forward_metadata_out_graph(view, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:  # noqa: ANN401
        for backend in self.attn_backends:
            backend.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)


def _decoding(forward_batch: Any) -> Any:  # noqa: ANN401  # SGLang's batch as one of decoding
    return build_inner_fb_view(
        forward_batch, bs=forward_batch.batch_size, forward_mode=ForwardMode.DECODE
    )
