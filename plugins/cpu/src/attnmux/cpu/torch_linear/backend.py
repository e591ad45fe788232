"""Linear layers in plain torch: the recurrence token by token in decode and in steps that verify
drafts, in chunks elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import conv1d, silu

from attnmux.core import L2_EPS, LinearAttentionBackend
from attnmux.cpu.torch_linear.chunks import CHANNEL_CHUNK, CHUNK, Chunks, run_chunks

if TYPE_CHECKING:
    from attnmux.core import ConvCall, ForwardBatch, LinearCall, LinearLayerSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExtendStep:
    """The requests of a step with many new tokens."""

    lens: list[int]
    """New tokens of each request."""
    fresh: torch.Tensor
    """[B] bool: whether a request starts from zeros."""
    starts: torch.Tensor
    """[B] int64: each request's first token."""
    request_of_token: torch.Tensor
    """[tokens of all requests] int64"""
    chunks: dict[int, Chunks]
    """By size, made when a layer first needs them."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests; a step may have padding after them."""
        return self.request_of_token.shape[0]

    def chunks_of(self, most: int) -> Chunks:
        """Chunks of up to `most` tokens, and no larger than the longest request needs."""
        size = min(most, 1 << (max(self.lens, default=1) - 1).bit_length())
        if size not in self.chunks:
            self.chunks[size] = Chunks.of(self.lens, size, self.starts.device)
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
        q, k = (_by_value_head(each, call.layer) for each in (call.q, call.k))
        decay = call.g.exp() if call.g.dim() == 3 else call.g.exp().unsqueeze(-1)
        beta = None if call.beta is None else call.beta.float().unsqueeze(-1)
        q, k, v, decay = (
            _by_request(each, shape) for each in (q, k, call.v.float(), decay.unsqueeze(-1))
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

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        mode = batch.forward_mode
        if not mode.is_extend() or mode.is_target_verify():
            return
        new, cached = batch.extend_lens()
        mirror = batch.extend_seq_lens_cpu
        lens = (new if mirror is None else mirror).tolist()
        ends = new.long().cumsum(0)
        requests = torch.arange(batch.batch_size, device=new.device)
        self._step = ExtendStep(
            lens=lens,
            fresh=cached == 0,
            starts=ends - new,
            request_of_token=requests.repeat_interleave(new.long(), output_size=sum(lens)),
            chunks={},
        )

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing to allocate: a captured step's tensors belong to its graph."""

    def forward_decode(self, call: LinearCall, batch: ForwardBatch) -> None:
        layer, rows = call.layer, batch.req_pool_indices
        pool = self.states.state(layer.layer_id)
        state = _read(pool, rows, batch.seq_lens <= 1).float()
        tokens = OneByOne.of(call, (batch.batch_size, 1))
        state, out = tokens.advance(state, 0)
        pool.index_copy_(0, rows, state.to(pool.dtype))
        call.out.copy_(out)

    def forward_verify(self, call: LinearCall, batch: ForwardBatch) -> None:
        layer, rows, num = call.layer, batch.req_pool_indices, batch.drafts().draft_token_num
        drafted = self.states.draft_state(layer.layer_id)
        state = _read(self.states.state(layer.layer_id), rows, batch.seq_lens <= 0).float()
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
        states = _read(pool, rows, step.fresh).float()
        q, k = (_by_value_head(each, layer) for each in (call.q, call.k))
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
        call.out[step.num_tokens :].zero_()
        chunks.join(out * layer.scaling, call.out)
        pool.index_copy_(0, rows, states.to(pool.dtype))

    def forward_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        run = self._convolve_decode if batch.forward_mode.is_decode() else self._convolve_extend
        run(call, batch)
        if call.silu:
            silu(call.out, inplace=True)

    def verify_conv(self, call: ConvCall, batch: ForwardBatch) -> None:
        """All drafts of a request after its W - 1 last inputs."""
        layer, rows, num = call.layer, batch.req_pool_indices, batch.drafts().draft_token_num
        drafted = self.states.draft_conv(layer.layer_id, call.index)
        history = _read(self.states.conv(layer.layer_id, call.index), rows, batch.seq_lens <= 0)
        x = _by_request(call.x, (batch.batch_size, num))
        line = torch.cat([history.to(x.dtype), x], dim=1)
        drafted[:, : line.shape[1]].index_copy_(0, rows, line.to(drafted.dtype))
        convolved = _convolved(line.transpose(1, 2), call).transpose(1, 2)
        call.out.copy_(convolved.flatten(0, 1))
        if call.silu:
            silu(call.out, inplace=True)

    def _convolve_decode(self, call: ConvCall, batch: ForwardBatch) -> None:
        pool, rows = self.states.conv(call.layer.layer_id, call.index), batch.req_pool_indices
        history = _read(pool, rows, batch.seq_lens <= 1)
        window = torch.cat([history.to(call.x.dtype), call.x.unsqueeze(1)], dim=1)
        pool.index_copy_(0, rows, window[:, 1:].to(pool.dtype))
        call.out.copy_(_convolved(window.transpose(1, 2), call).squeeze(-1))

    def _convolve_extend(self, call: ConvCall, batch: ForwardBatch) -> None:
        """All requests as one sequence, each after its W - 1 last inputs."""
        pool, step = self.states.conv(call.layer.layer_id, call.index), self._step
        before = call.layer.conv_size - 1
        history = _read(pool, batch.req_pool_indices, step.fresh).to(call.x.dtype)
        count, device = batch.batch_size, call.x.device
        line = call.x.new_empty((step.num_tokens + count * before, call.x.shape[1]))
        places = torch.arange(step.num_tokens, device=device) + before * step.request_of_token
        tail = torch.arange(before, device=device)
        begins = step.starts + before * torch.arange(count, device=device)
        line[places + before] = call.x[: step.num_tokens]
        line[begins.unsqueeze(1) + tail] = history
        assert batch.extend_seq_lens is not None  # the preparation has checked it
        last = line[(begins + batch.extend_seq_lens).unsqueeze(1) + tail]
        pool.index_copy_(0, batch.req_pool_indices, last.to(pool.dtype))
        call.out[step.num_tokens :].zero_()
        if step.num_tokens:
            convolved = _convolved(line.t().unsqueeze(0), call)[0]
            call.out[: step.num_tokens] = convolved[:, places].t()


def _convolved(windows: torch.Tensor, call: ConvCall) -> torch.Tensor:
    """[n, C, L - W + 1] of windows [n, C, L]."""
    return conv1d(windows, call.weight.unsqueeze(1), call.bias, groups=call.weight.shape[0])


def _by_request(values: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """[B, num, ...] of values [B * num, ...], the same memory. shape: (B, num)."""
    return values.view(*shape, *values.shape[1:])


def _read(pool: torch.Tensor, rows: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
    """The rows' states, with zeros for those that start: their rows may hold NaN."""
    held = pool[rows]
    return held.masked_fill_(fresh.view(-1, *[1] * (held.dim() - 1)), 0)


def _by_value_head(x: torch.Tensor, layer: LinearLayerSpec) -> torch.Tensor:
    """Q or K in float32, for each V head [T, Hv, K]."""
    x = x.float()
    if layer.qk_l2norm:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
    return x.repeat_interleave(layer.num_v_heads // layer.num_k_heads, dim=1)
