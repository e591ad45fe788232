"""The contract, served by TensorRT-LLM's MLA decode.

The library's conventions and ours: queries are one row of latent and rotary part; tables are whole
tiles of 128 keys wide; no request may be without keys; scales multiply. LSE is not asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardMode
from attnmux.core.call import AttentionCall
from attnmux.core.context import BackendContext
from attnmux.core.errors import GraphUnsupported, InvalidInput
from attnmux.nvidia.latent import RANK, KeyLens, joined, latent_layers
from attnmux.nvidia.page_tables import KeyGroup, Keys, Step
from attnmux.nvidia.pools import check_bfloat16_or_fp8
from attnmux.nvidia.rows import by_request, is_writable
from attnmux.nvidia.steps import check_room, prepared
from attnmux.nvidia.trtllm.workspace import workspace
from attnmux.nvidia.trtllm_mla.calls import LayerCall, decode_of
from attnmux.nvidia.trtllm_mla.padding import Padding, keep_to_own_pages

if TYPE_CHECKING:
    from attnmux.core.batch import ForwardBatch
    from attnmux.core.layer import LayerSpec
    from attnmux.nvidia.trtllm_mla.kernels import Kernels

WORKSPACE_BYTES = 128 << 20
"""What TensorRT-LLM's MLA is given by other engines."""

TILE = 128
"""Keys: `_check_trtllm_gen_mla_shape` wants tables of whole tiles, 4 pages of 32 or 2 of 64."""


class TRTLLMMLABackend(AttentionBackend):
    """MLA over pages of 32 or 64 tokens: decode, verify and draft; prefill is another backend's."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: Kernels
    ) -> None:
        """Raises InvalidInput for a platform, layers, a pool or options that no kernel serves."""
        super().__init__(context, options)
        layers = latent_layers(context)
        pool = context.token_to_kv_pool
        check_bfloat16_or_fp8(context)
        if TILE % pool.page_size:
            raise InvalidInput("page_size", came=pool.page_size, expected="32 or 64")
        self._calls = {layer.layer_id: LayerCall.of(layer, context) for layer in layers}
        self._group = KeyGroup.of(layers[0], context)
        scratch = workspace(context, options, default_bytes=WORKSPACE_BYTES)
        self._decode = decode_of(context.platform)(kernels, scratch)
        self._fixed: dict[KeyGroup, Keys] = {}
        self._fixed_lens: KeyLens | None = None
        self._fixed_batch_size = 0
        self._outgrown: list[tuple[dict[KeyGroup, Keys], KeyLens | None]] = []
        self._step: Step | None = None
        self._may_be_empty = False
        self._lens: KeyLens | None = None
        self._padding: Padding | None = None

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Decide the step's shape on the host; nothing is launched."""
        self._step = None
        mode = batch.forward_mode
        if mode is ForwardMode.IDLE:
            return
        if not (mode.is_decode() or mode.is_target_verify() or mode.is_draft_extend()):
            raise InvalidInput(
                "forward_mode", came=mode.name, expected="DECODE, TARGET_VERIFY or DRAFT_EXTEND"
            )
        self._check_capture(batch, in_capture)
        step = Step.of(batch, self.context, self._fixed if in_capture else {})
        padded = step.max_seqlen_q if mode.is_draft_extend() else 0
        self._step = replace(step, max_seqlen_k=-(-(step.max_seqlen_k + padded) // TILE) * TILE)
        known = None if in_capture else batch.seq_lens_cpu
        self._may_be_empty = mode.is_decode() and (known is None or not bool(known.all()))

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Build page tables and lengths on the device: at replay from what the batch then holds."""
        step = self._step
        if step is None:
            return
        self._lens = self._padding = None
        step.fill(batch, (self._group,), self.context)
        keys = step.keys[self._group]
        keep_to_own_pages(keys, self._group.page_size)
        if self._may_be_empty:
            self._lens = KeyLens.of(keys.lens, self._fixed_lens if step.fixed else None)
            keys = replace(keys, lens=self._lens.at_least_one)
        elif batch.forward_mode.is_draft_extend():
            self._padding = Padding.of(
                step.query_bounds(keys.lens.device),
                keys.lens,
                each=step.max_seqlen_q,
                num_tokens=batch.num_tokens,
            )
            keys = replace(keys, lens=self._padding.kv_lens)
        step.keys[self._group] = keys

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called again, for graphs of another mode, it keeps what captured graphs point at."""
        if max_bs > self._fixed_batch_size:
            self._outgrown.append((self._fixed, self._fixed_lens))
            device, page_size = self.context.device, self._group.page_size
            width = -(-self.context.max_context_len // TILE) * TILE // page_size
            table = torch.zeros((max_bs, width), dtype=torch.int32, device=device)
            lens = torch.zeros(max_bs, dtype=torch.int32, device=device)
            self._fixed = {self._group: Keys(page_table=table, lens=lens)}
            self._fixed_lens = KeyLens.buffers(max_bs, device)
            self._fixed_batch_size = max_bs

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call.q, call.q_rope, call.layer, call.out, call.lse)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if call.k is not None and not call.save_kv_cache:
            raise InvalidInput(
                "save_kv_cache", came=False, expected="True: keys are read from the pool"
            )
        return self._attend(call.q, call.q_rope, call.layer, call.out, call.lse)

    def _attend(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor | None,
        layer: LayerSpec,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        step = prepared(self._step)
        if lse is not None:
            raise InvalidInput("lse", came="a tensor", expected="None: XQA gives none")
        call = self._calls.get(layer.layer_id)
        if call is None:
            raise InvalidInput("layer", came=f"{layer.layer_id}, {layer.kind}", expected="mla")
        if not len(q):
            return q.new_empty((*q.shape[:2], RANK))
        queries, keys = joined(q, q_rope), step.keys[self._group]
        if self._padding is not None:
            spread = self._padding.spread(queries)
            result = self._decode(spread, call, keys, step.max_seqlen_k, None)
            return self._padding.gather(result)
        each = step.queries_each or 1
        into = by_request(out, each) if out is not None and is_writable(out) else None
        result = self._decode(by_request(queries, each), call, keys, step.max_seqlen_k, into)
        if self._lens is not None:
            self._lens.replace(result, 0)
        if out is not None and result is into:
            return out
        return result.flatten(0, 1)

    def _check_capture(self, batch: ForwardBatch, in_capture: bool) -> None:
        if not in_capture:
            return
        if batch.forward_mode.is_draft_extend():
            raise GraphUnsupported(
                "DRAFT_EXTEND runs without a graph: only steps with the same number of tokens for "
                "each request are captured"
            )
        check_room(batch, self._fixed_batch_size)
