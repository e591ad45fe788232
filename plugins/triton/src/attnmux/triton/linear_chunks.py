"""The chunks of a step of linear layers, and their kernels in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from attnmux.core import InvalidInput, cu_seqlens
from attnmux.triton.kernels.channel_chunks import (
    channel_outputs,
    solve_channel_chunks,
    weigh_channel_chunks,
)
from attnmux.triton.kernels.chunk_states import join_spans, pass_states, weigh_spans
from attnmux.triton.kernels.linear_chunks import chunk_outputs, solve_chunks

if TYPE_CHECKING:
    from attnmux.core import ForwardBatch, LinearCall

CHUNK = 64
LEAST_BLOCK = 64
"""Columns of a product whose left side is another product. With 32 and four warps, Triton 3.6 gives
wrong rows for all but the first warp on SM90."""
STATE_BLOCK = 32
"""Columns of a state that one program passes from chunk to chunk: fewer would be more programs, and
more would be fewer passes over W."""
LAUNCHES: dict[str, dict[str, int]] = {
    "solve": {"BLOCK_V": LEAST_BLOCK, "num_warps": 4},
    "outputs": {"BLOCK_V": LEAST_BLOCK, "num_warps": 4},
    "pass": {"BLOCK_V": STATE_BLOCK, "num_warps": 4},
    "weigh": {"BLOCK_V": STATE_BLOCK, "num_warps": 4},
    "join": {"BLOCK_V": STATE_BLOCK, "num_warps": 4},
    "weigh_channels": {"num_warps": 4},
    "solve_channels": {"BLOCK_V": LEAST_BLOCK, "num_warps": 4},
    "channel_outputs": {"BLOCK_V": LEAST_BLOCK, "num_warps": 4},
}
CHANNELS = 64
"""Of a chunk with a decay for each channel that a program holds at once."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearStep:
    """What the kernels read of a step with many new tokens."""

    starts: torch.Tensor
    """[B + 1] int32"""
    num_tokens: int
    """Tokens of all requests; a step may have padding after them."""
    longest: int
    """New tokens of the longest request."""
    request_of: torch.Tensor
    """[T] int32; -1 for padding."""
    chunk_indptr: torch.Tensor
    """[B + 1] int32"""
    chunk_first: torch.Tensor
    """[N] int32"""
    chunk_count: torch.Tensor
    """[N] int32"""

    @classmethod
    def of(cls, batch: ForwardBatch) -> LinearStep:
        """Raises InvalidInput without lengths. Reads them from the device where there is no host
        mirror."""
        new = batch.extend_seq_lens
        if new is None or batch.extend_prefix_lens is None:
            expected = "new and cached lengths in an extend step"
            raise InvalidInput("extend_seq_lens", got=None, expected=expected)
        mirror = batch.extend_seq_lens_cpu
        lens = (new.cpu() if mirror is None else mirror).long()
        total, device = int(lens.sum()), new.device
        counts = (lens + CHUNK - 1) // CHUNK
        chunk_request = torch.arange(len(lens)).repeat_interleave(counts)
        rank = torch.arange(len(chunk_request)) - (counts.cumsum(0) - counts)[chunk_request]
        first = (lens.cumsum(0) - lens)[chunk_request] + rank * CHUNK
        count = (lens[chunk_request] - rank * CHUNK).clamp(max=CHUNK)
        request_of = torch.arange(len(lens)).repeat_interleave(lens)
        padding = torch.full((batch.num_tokens - total,), -1)
        parts = [first, count, counts.cumsum(0), request_of, padding]
        packed = torch.cat(parts).to(torch.int32).to(device)
        sizes = [len(part) for part in parts]
        chunk_first, chunk_count, ends, *tokens = packed.split(sizes)  # type: ignore[no-untyped-call]  # torch's own
        return cls(
            starts=cu_seqlens(new),
            num_tokens=total,
            longest=int(lens.max()) if len(lens) else 0,
            request_of=torch.cat(tokens),
            chunk_indptr=torch.cat([ends.new_zeros(1), ends]),
            chunk_first=chunk_first,
            chunk_count=chunk_count,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkRun:
    """One layer's prompt in chunks."""

    call: LinearCall
    step: LinearStep
    states: torch.Tensor
    """[rows, Hv, K, V] float32"""
    rows: torch.Tensor
    """[B] int64"""
    known: torch.Tensor
    """[B] int32: cached tokens of each request."""
    block_k: int
    precision: str
    num_stages: int
    """Of the loop over a request's chunks."""
    compute_units: int
    least_span: int
    """Chunks of a span, at least."""

    def run(self) -> None:
        """Write the outputs and the states."""
        if self.call.g.dim() == 3:
            self._run_channels()
        else:
            self._run_heads()

    @property
    def _shape(self) -> dict[str, Any]:
        layer = self.call.layer
        return {
            "HV": layer.num_v_heads,
            "K": layer.head_k_dim,
            "V": layer.head_v_dim,
            "BLOCK_T": CHUNK,
            "BLOCK_K": self.block_k,
            "PRECISION": self.precision,
        }

    @property
    def _heads(self) -> dict[str, Any]:
        """How heads of Q and K become those of V."""
        layer = self.call.layer
        return {"GROUP": layer.num_v_heads // layer.num_k_heads, "NORMED": layer.qk_l2norm}

    @property
    def _chunks(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.step.chunk_first, self.step.chunk_count

    def _by_key(self, count: int) -> tuple[torch.Tensor, ...]:
        """So many tensors [T, Hv, K]."""
        layer, num_tokens = self.call.layer, self.call.v.shape[0]
        shape = (count, num_tokens, layer.num_v_heads, layer.head_k_dim)
        return self.call.v.new_empty(shape).unbind()

    def _run_heads(self) -> None:
        """With a decay for each head."""
        call, layer = self.call, self.call.layer
        heads, num_chunks = layer.num_v_heads, len(self.step.chunk_first)
        g = call.g.contiguous()
        beta = None if call.beta is None else call.beta.contiguous()
        new = torch.empty_like(call.v, memory_format=torch.contiguous_format)
        w = left = last = None
        if layer.has_delta_rule:
            w, left = self._by_key(2)
            last = call.g.new_empty((num_chunks, heads))
            solve_chunks[(num_chunks, heads)](
                *strided(call.k),
                *strided(call.v),
                g,
                beta,
                w,
                new,
                left,
                last,
                *self._chunks,
                **LAUNCHES["solve"],
                **self._shape,
                **self._heads,
            )
        kept = self._pass_states(g, beta, w, left, last, new)
        chunk_outputs[(triton.cdiv(layer.head_v_dim, LAUNCHES["outputs"]["BLOCK_V"]), heads, num_chunks)](
            *strided(call.q),
            *strided(call.k),
            g,
            new,
            kept,
            call.out,
            *self._chunks,
            layer.scaling,
            **LAUNCHES["outputs"],
            **self._shape,
            **self._heads,
        )

    def _run_channels(self) -> None:
        """With a decay for each channel, and the delta rule."""
        call, layer = self.call, self.call.layer
        heads, num_chunks = layer.num_v_heads, len(self.step.chunk_first)
        assert call.beta is not None  # of the delta rule
        g, beta = call.g.contiguous(), call.beta.contiguous()
        new = torch.empty_like(call.v, memory_format=torch.contiguous_format)
        asked, left, w = self._by_key(3)
        seen = call.v.new_empty((call.v.shape[0], heads, CHUNK))
        last = g.new_empty((num_chunks, heads, layer.head_k_dim))
        shape = {**self._shape, **self._heads, "BLOCK_C": min(self.block_k, CHANNELS)}
        weigh_channel_chunks[(num_chunks, heads)](
            *strided(call.q),
            *strided(call.k),
            g,
            seen,
            asked,
            left,
            last,
            *self._chunks,
            **LAUNCHES["weigh_channels"],
            **{name: value for name, value in shape.items() if name != "V"},
        )
        solve_channel_chunks[(num_chunks, heads)](
            *strided(call.k),
            *strided(call.v),
            g,
            beta,
            w,
            new,
            *self._chunks,
            **LAUNCHES["solve_channels"],
            **shape,
        )
        kept = self._pass_states(g, beta, w, left, last, new)
        channel_outputs[(triton.cdiv(layer.head_v_dim, LAUNCHES["channel_outputs"]["BLOCK_V"]), heads, num_chunks)](
            seen,
            asked,
            new,
            kept,
            call.out,
            *self._chunks,
            layer.scaling,
            **LAUNCHES["channel_outputs"],
            **self._shape,
        )

    def _pass_states(
        self,
        g: torch.Tensor,
        beta: torch.Tensor | None,
        w: torch.Tensor | None,
        left: torch.Tensor | None,
        last: torch.Tensor | None,
        new: torch.Tensor,
    ) -> torch.Tensor:
        """The states before each chunk, [N, Hv, K, V] in the dtype of the call."""
        call, layer, step = self.call, self.call.layer, self.step
        heads, k_dim, v_dim = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        requests, blocks = len(self.rows), triton.cdiv(v_dim, LAUNCHES["pass"]["BLOCK_V"])
        longest = triton.cdiv(step.longest, CHUNK)
        spans = self._spans(longest, requests * heads * blocks)
        span = triton.cdiv(longest, spans)
        kept = call.v.new_empty((len(step.chunk_first), heads, k_dim, v_dim))
        given = (*strided(call.k), *strided(call.v), g, beta, w, left, last, new)
        places = self.step.chunk_indptr, self.step.starts, span
        states = self.states, self.rows, self.known
        options = {
            "HAS_DELTA_RULE": layer.has_delta_rule,
            "BY_CHANNEL": call.g.dim() == 3,
            "HAS_BETA": beta is not None,
            "SPANS": spans,
            "num_stages": self.num_stages,
            **self._shape,
            **self._heads,
        }
        joined = None
        if spans > 1:
            parts = heads, requests * spans
            effects = g.new_empty((parts[1], heads, k_dim, v_dim + k_dim))
            joined = g.new_empty((parts[1], heads, k_dim, v_dim))
            columns = triton.cdiv(v_dim + k_dim, LAUNCHES["weigh"]["BLOCK_V"])
            weigh_spans[(columns, *parts)](*given, effects, *places, **LAUNCHES["weigh"], **options)
            names = "HV", "K", "V", "BLOCK_K", "PRECISION", "SPANS"
            join_spans[(triton.cdiv(v_dim, LAUNCHES["join"]["BLOCK_V"]), heads, requests)](
                effects,
                *states,
                joined,
                step.chunk_indptr,
                span,
                **{name: options[name] for name in names},
                **LAUNCHES["join"],
            )
        grid = blocks, heads, requests * spans
        pass_states[grid](*given, kept, *states, joined, *places, **LAUNCHES["pass"], **options)
        return kept

    def _spans(self, longest: int, programs: int) -> int:
        """Of the longest request, whose chunks are `longest`, if there are `programs` without.

        Chunks in spans are gone through three times, once for each half of their effects.
        """
        spans = min(self.compute_units // programs, longest // self.least_span)
        return spans if spans > 3 else 1


def strided(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A tensor of tokens, and the stride of these."""
    return x, x.stride(0)
