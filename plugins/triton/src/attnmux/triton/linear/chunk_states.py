"""The states of linear layers from chunk to chunk: which spans of a request go at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from attnmux.triton.kernels.linear.chunk_states import join_spans, pass_states, weigh_spans
from attnmux.triton.linear.step import CHUNK, LinearStep

if TYPE_CHECKING:
    from attnmux.triton.linear.device import LinearDevice

STATE_BLOCK = 32
"""Columns of a state that one program passes from chunk to chunk: fewer would be more programs, and
more would be fewer passes over W."""
EFFECT_BLOCK = 64
"""Columns of a span's effects that one program finds."""
MOST_STAGES = 4
"""Chunks that are loaded ahead: on an H200, a pass over 32,768 tokens takes 977 us with 2, 651 with
3 and 568 with 4."""
MOST_IN_REGISTERS = 2
"""The same if loads ahead go to registers. With 4, Triton 3.6 does not compile the delta rule
for gfx950."""
LEAST_SPANS = 4
"""Spans of a request, at least: its chunks are gone through three times then, two of these at
once."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StatePass:
    """One layer's states, from those before a step to those after it."""

    step: LinearStep
    read: tuple[torch.Tensor | int | None, ...]
    """Arguments that both kernels read, from k to last."""
    new: torch.Tensor
    """[T, Hv, V]: U, or the values from which the new ones are made."""
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """The states [rows, Hv, K, V] float32, rows [B] int64, and cached tokens [B] int32."""
    options: Mapping[str, Any]
    """Constants of both kernels that go through chunks."""
    device: LinearDevice
    least_span: int
    """Chunks of a span, at least."""

    def run(self) -> torch.Tensor:
        """The states before each chunk, [N, Hv, K, V] in the dtype of the call. Writes those after
        the step, and the new values."""
        states, rows, _ = self.states
        heads, k_dim, v_dim = states.shape[1:]
        requests, blocks = len(rows), triton.cdiv(v_dim, STATE_BLOCK)
        longest = triton.cdiv(self.step.longest, CHUNK)
        spans = self._spans(longest, requests * heads * blocks)
        span = triton.cdiv(longest, spans)
        joined = self._joined(span, spans) if spans > 1 else None
        kept = self.new.new_empty((len(self.step.chunk_first), heads, k_dim, v_dim))
        pass_states[blocks, heads, requests * spans](
            *self.read,
            self.new,
            kept,
            *self.states,
            joined,
            *self._places(span),
            **self._looping(STATE_BLOCK, spans),
        )
        return kept

    def _spans(self, longest: int, programs: int) -> int:
        """Spans of the longest request, of `longest` chunks, if there are `programs` without
        spans."""
        spans = min(self.device.compute_units // programs, longest // self.least_span)
        return spans if spans >= LEAST_SPANS else 1

    def _joined(self, span: int, spans: int) -> torch.Tensor:
        """The states before each span, [B * spans, Hv, K, V]."""
        states, rows, _ = self.states
        heads, k_dim, v_dim = states.shape[1:]
        number = len(rows) * spans
        effects = states.new_empty((number, heads, k_dim, v_dim + k_dim))
        weigh_spans[triton.cdiv(v_dim + k_dim, EFFECT_BLOCK), heads, number](
            *self.read, self.new, effects, *self._places(span), **self._looping(EFFECT_BLOCK, spans)
        )
        joined = states.new_empty((number, heads, k_dim, v_dim))
        names = "HV", "K", "V", "BLOCK_K", "PRECISION", "num_warps"
        join_spans[triton.cdiv(v_dim, STATE_BLOCK), heads, len(rows)](
            effects,
            *self.states,
            joined,
            self.step.chunk_indptr,
            span,
            BLOCK_V=STATE_BLOCK,
            SPANS=spans,
            **{name: self.options[name] for name in names},
        )
        return joined

    def _places(self, span: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.step.chunk_indptr, self.step.starts, span

    def _looping(self, block_v: int, spans: int) -> dict[str, Any]:
        chunk = CHUNK * (2 * self.options["BLOCK_K"] + block_v) * self.new.dtype.itemsize
        most = MOST_STAGES if self.device.copies_ahead else MOST_IN_REGISTERS
        stages = max(1, min(most, self.device.shared_memory // chunk))
        return {**self.options, "BLOCK_V": block_v, "SPANS": spans, "num_stages": stages}
