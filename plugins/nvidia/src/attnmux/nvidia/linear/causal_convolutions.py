"""Short causal convolutions on `sgl_kernel`'s `causal_conv1d_fwd` and `causal_conv1d_update`.

Facts of the kernels, from sgl_kernel/mamba.py of sglang-kernel 0.4.5 and
sgl-kernel/csrc/mamba/causal_conv1d.cu of SGLang:

- Both write the result over x, and return nothing. x, weight [C, W], bias [C] and the states have
  one dtype. W is 2 to 4: `causal_conv1d_fwd` launches nothing for others.
- `causal_conv1d_fwd` takes packed requests as x [C, T] and reads a channel's tokens, and the taps
  of a state [n, C, W - 1], end to end whatever their strides are. It leaves the states after each
  request's last token. Of a request without tokens it leaves garbage.
- `causal_conv1d_update` takes the same number of tokens of each request, x [n, C, d], and states
  [n, C, W - 1], each with any strides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core.plugin import PlainConvolutions, ShortConvolutions, StatePool
from attnmux.nvidia.linear.packed_requests import PackedRequests

if TYPE_CHECKING:
    from attnmux.core import ForwardBatch
    from attnmux.core.plugin import ConvCall

TAPS = (2, 3, 4)
"""Taps of the convolutions that the kernels compute."""
NO_PADDING = -1
"""The row of states whose requests the kernels leave out: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvKernels:
    """Functions of `sgl_kernel`."""

    causal_conv1d_fwd: Callable[..., None]
    """A convolution over packed requests."""
    causal_conv1d_update: Callable[..., None]
    """A convolution over the same number of tokens of each request."""


class CausalConvolutions(ShortConvolutions):
    """By the kernels if they serve the taps, else by plain operations."""

    _packed: PackedRequests

    def __init__(self, states: StatePool, kernels: ConvKernels) -> None:
        super().__init__(states)
        self._kernels = kernels
        self._plain = PlainConvolutions(states)

    def prepare(self, batch: ForwardBatch) -> None:
        self._plain.prepare(batch)
        self._packed = PackedRequests.of(self._plain.tokens)

    def run(self, call: ConvCall, batch: ForwardBatch) -> None:
        if not _is_served(call):
            self._plain.run(call, batch)
        elif batch.forward_mode.is_decode():
            self._convolve_one(call, batch)
        else:
            self._convolve_new(call, batch)

    def verify(self, call: ConvCall, batch: ForwardBatch) -> None:
        if not _is_served(call):
            self._plain.verify(call, batch)
            return
        line = self.keep_drafts(call, batch)
        history = line[:, : call.layer.conv_size - 1].clone()
        out = call.out.view(batch.batch_size, -1, call.out.shape[1])
        out.copy_(line[:, history.shape[1] :])
        self._update(call, out.transpose(1, 2), history.transpose(1, 2))

    def _convolve_one(self, call: ConvCall, batch: ForwardBatch) -> None:
        pool, rows = self.states.conv(call.layer.layer_id, call.index), batch.req_pool_indices
        history = StatePool.read(pool, rows, batch.seq_lens <= 1)
        call.out.copy_(call.x)
        self._update(call, call.out.unsqueeze(-1), history.transpose(1, 2))
        pool.index_copy_(0, rows, history)

    def _update(self, call: ConvCall, x: torch.Tensor, states: torch.Tensor) -> None:
        """x: [n, C, d], which becomes the result. states: [n, C, W - 1], which become those after
        x."""
        self._kernels.causal_conv1d_update(
            x, states, call.weight.contiguous(), call.bias, call.silu, None, None, NO_PADDING
        )

    def _convolve_new(self, call: ConvCall, batch: ForwardBatch) -> None:
        pool, rows = self.states.conv(call.layer.layer_id, call.index), batch.req_pool_indices
        packed, num = self._packed, self._packed.tokens.num_tokens
        before = packed.start(pool, rows)
        states = packed.of_active(before).transpose(1, 2).contiguous()
        call.out[num:].zero_()
        if num:
            x = call.x[:num].t().clone(memory_format=torch.contiguous_format)
            self._kernels.causal_conv1d_fwd(
                x,
                call.weight.contiguous(),
                call.bias,
                states,
                packed.indptr,
                None,
                packed.begun,
                call.silu,
                NO_PADDING,
            )
            call.out[:num] = x.t()
        packed.finish(pool, rows, before, states.transpose(1, 2))


def _is_served(call: ConvCall) -> bool:
    return call.layer.conv_size in TAPS and len(call.x) > 0
