"""Linear layers on Triton kernels: a token at a time for few new tokens, in chunks for prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from triton.runtime import driver

from attnmux.core import (
    NO_OPTIONS,
    BackendContext,
    InvalidInput,
    LinearAttentionBackend,
    cu_seqlens,
)
from attnmux.triton.factory import compute_units
from attnmux.triton.kernels.linear import convolve, convolve_one, keep_inputs, recur
from attnmux.triton.kernels.linear_chunks import chunk_outputs, pass_states, solve_chunks

if TYPE_CHECKING:
    from attnmux.core import ConvCall, ForwardBatch, LinearCall

CHUNK = 64
FEW_TOKENS = 16
"""Steps whose requests have no more new tokens than this run token by token."""
LEAST_BLOCK = 64
"""Columns of a product whose left side is another product. With 32 and four warps, Triton 3.6 gives
wrong rows for all but the first warp on SM90."""
STATE_BLOCK = 32
"""Columns of a state that one program passes from chunk to chunk: fewer would be more programs, and
more would be fewer passes over W."""
BLOCK_C = 256
BLOCK_T = 16


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


class TritonLinearBackend(LinearAttentionBackend):
    """The recurrences of kinds with a decay for each head, Kimi's delta rule, and convolutions."""

    _step: LinearStep

    def __init__(self, context: BackendContext, options: Mapping[str, object] = NO_OPTIONS) -> None:
        """Raises BackendFailed where Triton cannot drive the device."""
        super().__init__(context, options)
        compute_units(context)
        self._precisions = _precisions()
        self._shared_memory = _shared_memory(context.device)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        if batch.forward_mode.is_extend():
            self._step = LinearStep.of(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to allocate: decode steps read the batch and the states alone."""

    def forward_decode(self, call: LinearCall, batch: ForwardBatch) -> None:
        self._recur(call, batch, batch.seq_lens, None)

    def forward_extend(self, call: LinearCall, batch: ForwardBatch) -> None:
        step, known = self._step, batch.extend_prefix_lens
        assert known is not None  # LinearStep.of has checked it
        call.out[step.num_tokens :].zero_()
        if call.g.dim() == 3 or step.longest <= FEW_TOKENS:
            self._recur(call, batch, known, step.starts)
        else:
            self._run_chunks(call, batch, known)

    def _recur(
        self,
        call: LinearCall,
        batch: ForwardBatch,
        known: torch.Tensor,
        starts: torch.Tensor | None,
    ) -> None:
        layer = call.layer
        heads, k_dim, v_dim = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        block_k = triton.next_power_of_2(k_dim)
        block_v = min(triton.next_power_of_2(v_dim), max(8, 4096 // block_k))
        grid = (triton.cdiv(v_dim, block_v), heads, batch.batch_size)
        recur[grid](
            *_strided(call.q),
            *_strided(call.k),
            *_strided(call.v),
            call.g.contiguous(),
            None if call.beta is None else call.beta.contiguous(),
            call.out,
            self.states.state(layer.layer_id),
            batch.req_pool_indices,
            known,
            starts,
            layer.scaling,
            HV=heads,
            GROUP=heads // layer.num_k_heads,
            K=k_dim,
            V=v_dim,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            HAS_DELTA_RULE=layer.has_delta_rule,
            BY_CHANNEL=call.g.dim() == 3,
            HAS_BETA=call.beta is not None,
            NORMED=layer.qk_l2norm,
            IS_DECODE=starts is None,
            num_warps=4,
        )

    def _run_chunks(self, call: LinearCall, batch: ForwardBatch, known: torch.Tensor) -> None:
        layer, step, dtype = call.layer, self._step, call.v.dtype
        heads, k_dim, v_dim = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
        num_chunks = step.chunk_first.shape[0]
        shape = {
            "HV": heads,
            "GROUP": heads // layer.num_k_heads,
            "K": k_dim,
            "V": v_dim,
            "BLOCK_T": CHUNK,
            "BLOCK_K": max(LEAST_BLOCK, triton.next_power_of_2(k_dim)),
            "NORMED": layer.qk_l2norm,
            "PRECISION": self._precisions[dtype is torch.float32],
        }
        g = call.g.contiguous()
        beta = None if call.beta is None else call.beta.contiguous()
        new = torch.empty_like(call.v, memory_format=torch.contiguous_format)
        w = left = last = None
        if layer.has_delta_rule:
            w, left = call.v.new_empty((2, call.v.shape[0], heads, k_dim)).unbind()
            last = call.g.new_empty((num_chunks, heads))
            solve_chunks[(num_chunks, heads)](
                *_strided(call.k),
                *_strided(call.v),
                g,
                beta,
                w,
                new,
                left,
                last,
                step.chunk_first,
                step.chunk_count,
                BLOCK_V=LEAST_BLOCK,
                num_warps=4,
                **shape,
            )
        kept = call.v.new_empty((num_chunks, heads, k_dim, v_dim))
        pass_states[(triton.cdiv(v_dim, STATE_BLOCK), heads, batch.batch_size)](
            *_strided(call.k),
            *_strided(call.v),
            g,
            beta,
            w,
            left,
            last,
            new,
            kept,
            self.states.state(layer.layer_id),
            batch.req_pool_indices,
            known,
            step.chunk_indptr,
            step.chunk_first,
            step.chunk_count,
            BLOCK_V=STATE_BLOCK,
            HAS_DELTA_RULE=layer.has_delta_rule,
            HAS_BETA=beta is not None,
            num_warps=4,
            num_stages=self._stages(shape["BLOCK_K"], dtype.itemsize),
            **shape,
        )
        chunk_outputs[(triton.cdiv(v_dim, LEAST_BLOCK), heads, num_chunks)](
            *_strided(call.q),
            *_strided(call.k),
            g,
            new,
            kept,
            call.out,
            step.chunk_first,
            step.chunk_count,
            layer.scaling,
            BLOCK_V=LEAST_BLOCK,
            num_warps=4,
            **shape,
        )

    def _stages(self, block_k: int, itemsize: int) -> int:
        """Chunks that `pass_states` loads ahead, as far as shared memory goes: on an H200, 4 take
        0.96 times as long as 2 (1 x 32,768 tokens)."""
        chunk = CHUNK * (2 * block_k + STATE_BLOCK) * itemsize
        return max(1, min(4, self._shared_memory // chunk))

    def forward_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        x, states = call.x, self.states.conv(call.layer.layer_id, call.index)
        channels, taps = call.weight.shape
        block_c = min(BLOCK_C, triton.next_power_of_2(channels))
        blocks = triton.cdiv(channels, block_c)
        common = {"C": channels, "W": taps, "BLOCK_C": block_c}
        how = {"HAS_BIAS": call.bias is not None, "SILU": call.silu}
        weight, rows = call.weight.contiguous(), batch.req_pool_indices
        given = (*_strided(x), weight, call.bias, call.out, states, rows)
        if batch.forward_mode.is_decode():
            convolve_one[(batch.batch_size, blocks)](*given, batch.seq_lens, **common, **how)
            return
        step, known, num_tokens = self._step, batch.extend_prefix_lens, x.shape[0]
        if num_tokens:
            tokens = step.starts, step.request_of, num_tokens
            convolve[(triton.cdiv(num_tokens, BLOCK_T), blocks)](
                *given, known, *tokens, BLOCK_T=BLOCK_T, **common, **how
            )
        if taps > 1:
            keep_inputs[(batch.batch_size, blocks)](
                *_strided(x),
                states,
                rows,
                known,
                step.starts,
                BLOCK_W=triton.next_power_of_2(taps - 1),
                **common,
            )


def _strided(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x, x.stride(0)


def _shared_memory(device: torch.device) -> int:
    """Bytes of a program's shared memory that loads may take; products need the rest."""
    if triton.knobs.runtime.interpret:
        return 0
    facts = driver.active.utils.get_device_properties(device.index or 0)
    return int(facts["max_shared_mem"]) * 7 // 10


def _precisions() -> tuple[str, str]:
    """How float32 is multiplied in calls of 16 bits, and in calls of float32.

    The inverse of a chunk is float32 until it is rounded to the dtype of the call.
    """
    if triton.knobs.runtime.interpret:
        return "ieee", "ieee"
    target = driver.active.get_current_target()
    options = triton.compiler.make_backend(target).parse_options({})
    return ("tf32" if "tf32" in options.allowed_dot_input_precisions else "ieee"), "ieee"
