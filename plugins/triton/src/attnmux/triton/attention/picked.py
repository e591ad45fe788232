"""Sparse MLA: each token attends to the latent rows that its layer's indexer picked.

A program takes a token and a block of heads, and gathers the rows by the request table. If there
are fewer tokens than the device has units, as in decode, programs share a token's picks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    AttnmuxError,
    BackendContext,
    ForwardMode,
    InvalidInput,
)
from attnmux.core.plugin import cu_seqlens, token_rows
from attnmux.triton.attention.layer import LOG2_E, TritonLayer
from attnmux.triton.attention.splits import SplitMerge
from attnmux.triton.attention.step import NO_STEP
from attnmux.triton.kernels.merge import MOST_SPLITS
from attnmux.triton.kernels.picked import attend_picks
from attnmux.triton.launches.bound_kernel import BoundKernel, Launcher
from attnmux.triton.launches.operands import Keys, Results
from attnmux.triton.launches.shapes import next_power_of_2

if TYPE_CHECKING:
    from attnmux.core import ForwardBatch

BLOCK_H = 16
"""Heads of a program: the fewest rows that tensor cores multiply."""
BLOCK_N = 32
"""Rows of K that a program gathers at a time: 36 KiB of DeepSeek's."""
LEAST_KEYS = 128
"""Picks of a part: a smaller one costs more to merge than it saves."""
ALIKE_KEYS = 512
"""Picks of a part if results must not depend on the batch."""
STRIDES = (
    *("q_stride", "q_head_stride", "q_rope_stride", "q_rope_head_stride"),
    *("k_stride", "k_rope_stride", "table_stride", "picks_stride", "out_stride", "lse_stride"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PickedStep:
    """A prepared step."""

    rows: torch.Tensor
    """[T // queries] int64: rows of the request table."""
    queries: int = 1
    """Tokens that share each of them: in verification those of a request."""


class PickedBackend(AttentionBackend):
    """Prefill, decoding and chains of drafts of kind "nsa"."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], *, compute_units: int
    ) -> None:
        """compute_units: SMs or CUs of the device, which share the picks of few tokens.

        Raises InvalidInput for layers that the kernel does not serve.
        """
        super().__init__(context, options)
        self.launcher = Launcher()
        self._units = compute_units
        self._layers = {
            spec.layer_id: PickedLayer(
                TritonLayer.of(spec, context, self.launcher),
                context.token_to_kv_pool.slot_map(spec.layer_id),
            )
            for spec in context.layers
        }
        self._step: PickedStep | None = None

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Raises InvalidInput for a mask of drafts: an indexer picks what a token sees."""
        if batch.spec_info is not None and batch.spec_info.custom_mask is not None:
            raise InvalidInput("custom_mask", got="a mask", expected="None: the indexer masks")
        self._step = None

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        if batch.forward_mode is ForwardMode.IDLE:
            return
        rows, new = batch.req_pool_indices, batch.extend_seq_lens
        if batch.spec_info is not None and batch.forward_mode.is_target_verify():
            self._step = PickedStep(rows=rows, queries=batch.spec_info.draft_token_num)
            return
        if batch.forward_mode.is_extend() and new is not None:
            rows = token_rows(rows, new, batch.num_tokens)
        self._step = PickedStep(rows=rows)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """A step reads the batch's own tensors alone."""

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, batch, over_pool=True)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, batch, over_pool=not call.has_own_kv)

    def _attend(self, call: AttentionCall, batch: ForwardBatch, *, over_pool: bool) -> torch.Tensor:
        step, picks = self._step, batch.topk_indices
        if step is None:
            raise AttnmuxError(NO_STEP)
        if picks is None:
            expected = "the keys that the indexer picked: the model writes them before each layer"
            raise InvalidInput("topk_indices", got=None, expected=expected)
        results, layer = Results.of(call), self._layers[call.layer.layer_id]
        if not call.q.shape[0]:
            return results.out
        table = self.context.req_to_token_pool.req_to_token if over_pool else None
        step = step if over_pool else PickedStep(rows=_starts(batch))
        part_keys = self._part_keys(call, picks.shape[1])
        layer(call, step, table, picks, results, part_keys)
        return results.handed_to(call)

    def _part_keys(self, call: AttentionCall, topk: int) -> int:
        """Picks of each part. All are one part if the device is busy without."""
        if self.context.request.deterministic:
            return ALIKE_KEYS
        programs = call.q.shape[0] * -(-call.layer.tp_q_head_num // BLOCK_H)
        parts = min(self._units // programs, topk // LEAST_KEYS, int(MOST_SPLITS.value))
        if parts < 2:
            return max(topk, 1)
        return -(-topk // (parts * BLOCK_N)) * BLOCK_N


class PickedLayer:
    """A layer's launches."""

    def __init__(self, layer: TritonLayer, slot_map: torch.Tensor | None) -> None:
        self._layer = layer
        self._slot_map = slot_map
        self._merge = SplitMerge(layer)
        self._bound: dict[tuple[bool, bool], BoundKernel] = {}

    def __call__(
        self,
        call: AttentionCall,
        step: PickedStep,
        table: torch.Tensor | None,
        picks: torch.Tensor,
        results: Results,
        part_keys: int,
    ) -> None:
        """table: None if the step's rows count the call's own keys."""
        if call.q_rope is None:
            raise InvalidInput("q_rope", got=None, expected="the rotary part of Q")
        spec, topk, num_tokens = self._layer.spec, picks.shape[1], call.q.shape[0]
        parts = max(-(-topk // part_keys), 1)
        merges = parts > 1 or spec.sinks is not None
        into = self._merge.parts(parts, num_tokens, call.q.device) if merges else results
        k, k_rope = self._keys(call, over_pool=table is not None)
        picks = picks if picks.stride(1) == 1 else picks.contiguous()
        out, lse = into
        self._kernel(over_pool=table is not None, has_lse=lse is not None)(
            (num_tokens, -(-spec.tp_q_head_num // BLOCK_H), parts),
            (call.q, call.q_rope, k, k_rope, table, step.rows, picks, out, lse),
            (
                *call.q.stride()[:2],
                *call.q_rope.stride()[:2],
                *(k.stride(0), k_rope.stride(0)),
                0 if table is None else table.stride(0),
                picks.stride(0),
                out.stride(0),
                0 if lse is None else lse.stride(0),
            ),
            (topk, part_keys, num_tokens, step.queries),
            (call.q.dtype, k.dtype, out.dtype),
        )
        if merges:
            self._merge(parts, into, results)

    def _keys(self, call: AttentionCall, *, over_pool: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """(latent [n, rank], rotary part [n, rope])."""
        keys = self._layer.required_keys() if over_pool else Keys.of_call(call)
        rank = self._layer.spec.v_head_dim
        rows = keys.k[:, 0]
        if keys.k_rope is None:
            return rows[:, :rank], rows[:, rank:]
        return rows, keys.k_rope[:, 0]

    def _kernel(self, *, over_pool: bool, has_lse: bool) -> BoundKernel:
        bound = self._bound.get((over_pool, has_lse))
        if bound is None:
            bound = self._bound[over_pool, has_lse] = self._bind(over_pool, has_lse)
        return bound

    def _bind(self, over_pool: bool, has_lse: bool) -> BoundKernel:
        spec = self._layer.spec
        k_scale, v_scale = self._layer.scales if over_pool else (1.0, 1.0)
        rank, rope = spec.v_head_dim, spec.qk_rope_head_dim
        return BoundKernel(
            self._layer.launcher,
            attend_picks,
            {
                "slot_map": self._slot_map if over_pool else None,
                "scale": spec.scaling * k_scale * LOG2_E,
                "v_scale": v_scale,
                "HEADS": spec.tp_q_head_num,
                "RANK": rank,
                "ROPE": rope,
                "BLOCK_RANK": max(next_power_of_2(rank), 16),
                "BLOCK_ROPE": max(next_power_of_2(rope), 16),
                "BLOCK_H": BLOCK_H,
                "BLOCK_N": BLOCK_N,
                "HAS_LSE": has_lse,
            },
            tensors=("q", "q_rope", "k", "k_rope", "table", "rows", "picks", "out", "lse"),
            numbers=STRIDES,
            counts=("topk", "part_keys", "num_tokens", "queries"),
            options={"num_warps": 4, "num_stages": 2},
        )


def _starts(batch: ForwardBatch) -> torch.Tensor:
    """[T] int64: where the keys of each token's request begin among the call's own."""
    new = batch.extend_seq_lens
    if new is None:
        raise InvalidInput("extend_seq_lens", got=None, expected="lengths in an extend step")
    return token_rows(cu_seqlens(new)[:-1].long(), new, batch.num_tokens)
