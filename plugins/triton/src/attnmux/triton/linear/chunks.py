"""The kernels of linear layers in chunks, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from attnmux.triton.kernels.linear.channel_chunks import (
    channel_outputs,
    solve_channel_chunks,
    weigh_channel_chunks,
)
from attnmux.triton.kernels.linear.chunks import chunk_outputs, solve_chunks
from attnmux.triton.linear.chunk_states import StatePass
from attnmux.triton.linear.step import CHUNK, LinearStep, strided

if TYPE_CHECKING:
    from attnmux.core.plugin import LinearCall
    from attnmux.triton.linear.device import LinearDevice

LEAST_BLOCK = 64
"""Columns of a product whose left side is another product. With 32 and four warps, Triton 3.6 gives
wrong rows for all but the first warp on SM90."""
WIDE_BLOCK = 128
CHANNELS = 64
"""Channels of a chunk with a decay for each channel that a program holds at once."""
FEW_CHANNELS = 16
"""The same if registers lack: compiled for gfx1201, 64 spill 1,240 bytes a thread, 32 spill 244,
and 16 none."""
SOLVE_REGISTERS = 168
"""Registers of a thread that inverts a chunk: three programs fit a multiprocessor of an H200, and
take 0.9 times as long as two (with a decay for each channel 0.8 times)."""


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
    device: LinearDevice
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
            "BLOCK_K": max(LEAST_BLOCK, triton.next_power_of_2(layer.head_k_dim)),
            "PRECISION": self.device.precision(self.call.v.dtype),
            "num_warps": 8 if self.device.lacks_registers else 4,
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
                BLOCK_V=LEAST_BLOCK,
                **self.device.registers(SOLVE_REGISTERS),
                **self._shape,
                **self._heads,
            )
        kept = self._pass_states(g, beta, w, left, last, new)
        block_v = self._output_block
        chunk_outputs[(triton.cdiv(layer.head_v_dim, block_v), heads, num_chunks)](
            *strided(call.q),
            *strided(call.k),
            g,
            new,
            kept,
            call.out,
            *self._chunks,
            layer.scaling,
            BLOCK_V=block_v,
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
        # Products of unit vectors fit float16
        is_short = layer.qk_l2norm and call.v.dtype is not torch.float32
        met = seen.new_empty(seen.shape, dtype=torch.float16 if is_short else torch.float32)
        last = g.new_empty((num_chunks, heads, layer.head_k_dim))
        weigh_channel_chunks[(num_chunks, heads)](
            *strided(call.q),
            *strided(call.k),
            g,
            seen,
            met,
            asked,
            w,
            left,
            last,
            *self._chunks,
            BLOCK_C=FEW_CHANNELS if self.device.lacks_registers else CHANNELS,
            **{name: value for name, value in self._shape.items() if name != "V"},
            **self._heads,
        )
        solve_channel_chunks[(num_chunks, heads)](
            *strided(call.v),
            beta,
            met,
            w,
            new,
            *self._chunks,
            BLOCK_V=LEAST_BLOCK,
            NORMED=layer.qk_l2norm,
            **self.device.registers(SOLVE_REGISTERS),
            **self._shape,
        )
        kept = self._pass_states(g, beta, w, left, last, new)
        block_v = self._output_block
        channel_outputs[(triton.cdiv(layer.head_v_dim, block_v), heads, num_chunks)](
            seen,
            asked,
            new,
            kept,
            call.out,
            *self._chunks,
            layer.scaling,
            BLOCK_V=block_v,
            **self._shape,
        )

    @property
    def _output_block(self) -> int:
        """Columns of V that one program makes: all of 128 if they fit, so that the weights of a
        chunk are made once."""
        block_k = self._shape["BLOCK_K"]
        read = 2 * CHUNK * block_k + WIDE_BLOCK * (block_k + CHUNK)
        fits = read * self.call.v.dtype.itemsize <= self.device.shared_memory
        is_wide = self.call.layer.head_v_dim > LEAST_BLOCK and block_k <= WIDE_BLOCK
        return WIDE_BLOCK if fits and is_wide else LEAST_BLOCK

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
        call = self.call
        return StatePass(
            step=self.step,
            read=(*strided(call.k), *strided(call.v), g, beta, w, left, last),
            new=new,
            states=(self.states, self.rows, self.known),
            options={
                **self._shape,
                **self._heads,
                "HAS_DELTA_RULE": call.layer.has_delta_rule,
                "BY_CHANNEL": g.dim() == 3,
                "HAS_BETA": beta is not None,
            },
            device=self.device,
            least_span=self.least_span,
        ).run()
