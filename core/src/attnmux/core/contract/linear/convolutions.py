"""The short causal convolutions of linear layers, as backends share them, and in plain torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch.nn.functional import conv1d, silu

from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.linear.layer import ConvCall
from attnmux.core.contract.linear.states import StatePool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NewTokens:
    """The requests of a step with many new tokens."""

    lens: list[int]
    """New tokens of each request."""
    fresh: torch.Tensor
    """[B] bool: whether a request starts from zeros."""
    starts: torch.Tensor
    """[B] int64: each request's first token."""
    request_of_token: torch.Tensor
    """[tokens of all requests] int64"""

    @classmethod
    def of(cls, batch: ForwardBatch) -> NewTokens:
        """Reads the lengths from the device if there is no host mirror. Raises InvalidInput
        without lengths."""
        new, cached = batch.extend_lens()
        mirror = batch.extend_seq_lens_cpu
        lens: list[int] = (new if mirror is None else mirror).tolist()
        requests = torch.arange(batch.batch_size, device=new.device)
        return cls(
            lens=lens,
            fresh=cached == 0,
            starts=new.long().cumsum(0) - new,
            request_of_token=requests.repeat_interleave(new.long(), output_size=sum(lens)),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests; a step may have padding after them."""
        return self.request_of_token.shape[0]


class ShortConvolutions(ABC):
    """The convolutions of a backend's layers, over the states of one pool.

    A plugin offers its own as the shared kernel `short_convolutions`.
    """

    def __init__(self, states: StatePool) -> None:
        self.states = states

    @abstractmethod
    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare an extend step, once for all layers and outside of graphs; other steps need no
        preparation. Raises InvalidInput without lengths."""

    @abstractmethod
    def run(self, call: ConvCall, batch: ForwardBatch) -> None:
        """Serve `LinearAttentionBackend.forward_conv`: a decode step's convolution, or one of the
        extend step that was prepared last. Tokens of no request get zeros."""

    @abstractmethod
    def verify(self, call: ConvCall, batch: ForwardBatch) -> None:
        """Serve `LinearAttentionBackend.verify_conv`."""

    def keep_drafts(self, call: ConvCall, batch: ForwardBatch) -> torch.Tensor:
        """Write the states after drafts, `StatePool.draft_conv`.

        Returns them in the dtype of the call: [B, W - 1 + d, C], the inputs before the drafts,
        zeros for requests that start with them, then the drafts'.
        """
        layer_id, rows, states = call.layer.layer_id, batch.req_pool_indices, self.states
        num, drafted = batch.drafts().draft_token_num, states.draft_conv(layer_id, call.index)
        history = states.read(states.conv(layer_id, call.index), rows, batch.seq_lens <= 0)
        x = call.x.view(batch.batch_size, num, call.x.shape[1])
        line = torch.cat([history.to(x.dtype), x], dim=1)
        drafted[:, : line.shape[1]].index_copy_(0, rows, line.to(drafted.dtype))
        return line


class PlainConvolutions(ShortConvolutions):
    """In plain torch, on any device and of any number of taps."""

    tokens: NewTokens
    """New tokens of the extend step that was prepared last."""

    def prepare(self, batch: ForwardBatch) -> None:
        self.tokens = NewTokens.of(batch)

    def run(self, call: ConvCall, batch: ForwardBatch) -> None:
        if batch.forward_mode.is_decode():
            self._convolve_one(call, batch)
        else:
            self._convolve_new(call, batch)
        _activate(call)

    def verify(self, call: ConvCall, batch: ForwardBatch) -> None:
        """All drafts of a request after its W - 1 last inputs."""
        line = self.keep_drafts(call, batch)
        convolved = _convolved(line.transpose(1, 2), call).transpose(1, 2)
        call.out.copy_(convolved.flatten(0, 1))
        _activate(call)

    def _convolve_one(self, call: ConvCall, batch: ForwardBatch) -> None:
        pool, rows = self.states.conv(call.layer.layer_id, call.index), batch.req_pool_indices
        history = StatePool.read(pool, rows, batch.seq_lens <= 1)
        window = torch.cat([history.to(call.x.dtype), call.x.unsqueeze(1)], dim=1)
        pool.index_copy_(0, rows, window[:, 1:].to(pool.dtype))
        call.out.copy_(_convolved(window.transpose(1, 2), call).squeeze(-1))

    def _convolve_new(self, call: ConvCall, batch: ForwardBatch) -> None:
        """All requests as one sequence, each after its W - 1 last inputs."""
        pool, tokens = self.states.conv(call.layer.layer_id, call.index), self.tokens
        before = call.layer.conv_size - 1
        history = StatePool.read(pool, batch.req_pool_indices, tokens.fresh).to(call.x.dtype)
        count, num, device = batch.batch_size, tokens.num_tokens, call.x.device
        line = call.x.new_empty((num + count * before, call.x.shape[1]))
        places = torch.arange(num, device=device) + before * tokens.request_of_token
        tail = torch.arange(before, device=device)
        begins = tokens.starts + before * torch.arange(count, device=device)
        line[places + before] = call.x[:num]
        line[begins.unsqueeze(1) + tail] = history
        assert batch.extend_seq_lens is not None  # the preparation has checked it
        last = line[(begins + batch.extend_seq_lens).unsqueeze(1) + tail]
        pool.index_copy_(0, batch.req_pool_indices, last.to(pool.dtype))
        call.out[num:].zero_()
        if num:
            convolved = _convolved(line.t().unsqueeze(0), call)[0]
            call.out[:num] = convolved[:, places].t()


def _convolved(windows: torch.Tensor, call: ConvCall) -> torch.Tensor:
    """[n, C, L - W + 1] of windows [n, C, L]."""
    return conv1d(windows, call.weight.unsqueeze(1), call.bias, groups=call.weight.shape[0])


def _activate(call: ConvCall) -> None:
    if call.silu:
        silu(call.out, inplace=True)
