"""Linear layers in plain torch: the recurrence token by token in decode and in steps that verify
drafts, in chunks elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core import AttentionBackend
from attnmux.core.plugin import (
    LinearAttentionBackend,
    NewTokens,
    PlainConvolutions,
    StatePool,
)
from attnmux.cpu.torch_linear.chunks import CHANNEL_CHUNK, CHUNK, Chunks, run_chunks

if TYPE_CHECKING:
    from attnmux.core import BackendContext, ForwardBatch, LinearLayerSpec
    from attnmux.core.plugin import ConvCall, LinearCall


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExtendStep:
    """A step with many new tokens."""

    tokens: NewTokens
    chunks: dict[int, Chunks]
    """By size, made when a layer first needs them."""

    def chunks_of(self, most: int) -> Chunks:
        """Chunks of up to `most` tokens, and no larger than the longest request needs."""
        lens = self.tokens.lens
        size = min(most, 1 << (max(lens, default=1) - 1).bit_length())
        if size not in self.chunks:
            self.chunks[size] = Chunks.of(lens, size, self.tokens.starts.device)
        return self.chunks[size]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OneByOne:
    """The same number of new tokens of each request, [B, num, ...] float32."""

    layer: LinearLayerSpec
    q: torch.Tensor
    """[B, num, Hv, K]"""
    k: torch.Tensor
    """[B, num, Hv, K]"""
    v: torch.Tensor
    """[B, num, Hv, V]"""
    decay: torch.Tensor
    """[B, num, Hv, 1 or K, 1]"""
    beta: torch.Tensor | None
    """[B, num, Hv, 1]"""

    @classmethod
    def of(cls, call: LinearCall, shape: tuple[int, int]) -> OneByOne:
        """shape: (B, num)."""
        q, k = (_by_value_head(tensor, call.layer) for tensor in (call.q, call.k))
        decay = call.g.exp() if call.g.dim() == 3 else call.g.exp().unsqueeze(-1)
        beta = None if call.beta is None else call.beta.float().unsqueeze(-1)
        q, k, v, decay = (
            _by_request(tensor, shape) for tensor in (q, k, call.v.float(), decay.unsqueeze(-1))
        )
        beta = None if beta is None else _by_request(beta, shape)
        return cls(layer=call.layer, q=q, k=k, v=v, decay=decay, beta=beta)

    def advance(self, state: torch.Tensor, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The states [B, Hv, K, V] after each request's token of that place, and its outputs
        [B, Hv, V]."""
        q, k, added = self.q[:, place], self.k[:, place], self.v[:, place]
        state = state * self.decay[:, place]
        if self.layer.has_delta_rule:
            added = added - torch.einsum("bhkv,bhk->bhv", state, k)
        if self.beta is not None:
            added = added * self.beta[:, place]
        state = state + k.unsqueeze(-1) * added.unsqueeze(-2)
        return state, torch.einsum("bhkv,bhk->bhv", state, q) * self.layer.scaling


class TorchLinearBackend(LinearAttentionBackend):
    """Recurrences and convolutions of every kind, on any device that torch has.

    Products and states are float32, whatever the dtype of the call. Decode steps, and those that
    verify drafts, can be captured in device graphs.
    """

    _step: ExtendStep

    def __init__(
        self, context: BackendContext, options: Mapping[str, object] = AttentionBackend.NO_OPTIONS
    ) -> None:
        super().__init__(context, options)
        self._convolutions = PlainConvolutions(self.states)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        mode = batch.forward_mode
        if not mode.is_extend() or mode.is_target_verify():
            return
        self._convolutions.prepare(batch)
        self._step = ExtendStep(tokens=self._convolutions.tokens, chunks={})

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to allocate: a captured step's tensors belong to its graph."""

    def forward_decode(self, call: LinearCall, batch: ForwardBatch) -> None:
        layer, rows = call.layer, batch.req_pool_indices
        pool = self.states.state(layer.layer_id)
        state = StatePool.read(pool, rows, batch.seq_lens <= 1).float()
        tokens = OneByOne.of(call, (batch.batch_size, 1))
        state, out = tokens.advance(state, 0)
        pool.index_copy_(0, rows, state.to(pool.dtype))
        call.out.copy_(out)

    def forward_verify(self, call: LinearCall, batch: ForwardBatch) -> None:
        layer, rows, num = call.layer, batch.req_pool_indices, batch.drafts().draft_token_num
        drafted = self.states.draft_state(layer.layer_id)
        state = StatePool.read(self.states.state(layer.layer_id), rows, batch.seq_lens <= 0).float()
        shape = batch.batch_size, num
        tokens, answers = OneByOne.of(call, shape), _by_request(call.out, shape)
        for place in range(num):
            state, out = tokens.advance(state, place)
            drafted[:, place].index_copy_(0, rows, state.to(drafted.dtype))
            answers[:, place].copy_(out)

    def forward_extend(self, call: LinearCall, batch: ForwardBatch) -> None:
        layer, rows, step = call.layer, batch.req_pool_indices, self._step
        pool = self.states.state(layer.layer_id)
        chunks = step.chunks_of(CHANNEL_CHUNK if call.g.dim() == 3 else CHUNK)
        states = StatePool.read(pool, rows, step.tokens.fresh).float()
        q, k = (_by_value_head(tensor, layer) for tensor in (call.q, call.k))
        out = run_chunks(
            chunks,
            chunks.cut(q),
            chunks.cut(k),
            chunks.cut(call.v),
            chunks.cut(call.g if call.g.dim() == 3 else call.g.unsqueeze(-1)),
            None if call.beta is None else chunks.cut(call.beta.unsqueeze(-1)),
            states,
            has_delta_rule=layer.has_delta_rule,
        )
        call.out[step.tokens.num_tokens :].zero_()
        chunks.join(out * layer.scaling, call.out)
        pool.index_copy_(0, rows, states.to(pool.dtype))

    def forward_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        self._convolutions.run(call, batch)

    def verify_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        self._convolutions.verify(call, batch)


def _by_request(values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """[B, num, ...] of values [B * num, ...], the same memory. shape: (B, num)."""
    return values.view(*shape, *values.shape[1:])


def _by_value_head(x: torch.Tensor, layer: LinearLayerSpec) -> torch.Tensor:
    """Q or K in float32, for each V head [T, Hv, K]."""
    x = x.float()
    if layer.qk_l2norm:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + layer.L2_EPS)
    return x.repeat_interleave(layer.num_v_heads // layer.num_k_heads, dim=1)
