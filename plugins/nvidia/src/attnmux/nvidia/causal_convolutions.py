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
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from attnmux.core import (
    NewTokens,
    convolve_drafts,
    convolve_new,
    convolve_one,
    keep_drafts,
    read_states,
)

if TYPE_CHECKING:
    from attnmux.core import ConvCall, ForwardBatch, LinearStatePool

TAPS = (2, 3, 4)
"""Of the convolutions that the kernels compute."""
NO_PADDING = -1
"""The row of states whose requests the kernels leave out: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvKernels:
    """Functions of `sgl_kernel`."""

    causal_conv1d_fwd: Callable[..., None]
    """A convolution over packed requests."""
    causal_conv1d_update: Callable[..., None]
    """A convolution over the same number of tokens of each request."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRequests:
    """The requests of an extend step, and those of them that have new tokens."""

    tokens: NewTokens
    active: torch.Tensor | None
    """[n] int64: the requests with new tokens; None where all have some."""
    indptr: torch.Tensor
    """[n + 1] int32: their first tokens, and the end of the last."""
    begun: torch.Tensor
    """[n] bool: which of them start from a state."""

    @classmethod
    def of(cls, batch: ForwardBatch) -> PackedRequests:
        """Raises InvalidInput without lengths."""
        tokens = NewTokens.of(batch)
        device, lens = tokens.starts.device, tokens.lens
        filled = [request for request, count in enumerate(lens) if count]
        ends = [0, *accumulate(lens[request] for request in filled)]
        active = None
        if len(filled) < len(lens):
            active = torch.tensor(filled, dtype=torch.int64, device=device)
        begun = ~tokens.fresh
        return cls(
            tokens=tokens,
            active=active,
            indptr=torch.tensor(ends, dtype=torch.int32, device=device),
            begun=begun if active is None else begun[active],
        )

    def start(self, pool: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[B, ...] the states before the step, zeros where a request starts."""
        return read_states(pool, rows, self.tokens.fresh)

    def of_active(self, states: torch.Tensor) -> torch.Tensor:
        """[n, ...] of states [B, ...]."""
        return states if self.active is None else states[self.active]

    def finish(
        self, pool: torch.Tensor, rows: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> None:
        """Write states after [n, ...] to the requests' rows, and those before [B, ...] to the rows
        of requests without new tokens. Overwrites `before`."""
        if self.active is not None:
            after = before.index_copy_(0, self.active, after)
        pool.index_copy_(0, rows, after)


class CausalConvolutions:
    """The convolutions of a backend's layers: by the kernels where they serve the taps, else by
    plain operations."""

    def __init__(self, states: LinearStatePool, kernels: ConvKernels | None) -> None:
        """kernels: None where no package provides them."""
        self._states = states
        self._kernels = kernels

    def run(self, call: ConvCall, batch: ForwardBatch, step: PackedRequests | None) -> None:
        """As `LinearAttentionBackend.forward_conv`. step: None in a decode step."""
        kernels = self._serving(call)
        if step is None:
            if kernels is None:
                convolve_one(call, batch, self._states)
            else:
                self._update(kernels, call, batch)
        elif kernels is None:
            convolve_new(call, batch, self._states, step.tokens)
        else:
            self._convolve(kernels, call, batch, step)

    def verify(self, call: ConvCall, batch: ForwardBatch) -> None:
        """As `LinearAttentionBackend.verify_conv`."""
        kernels = self._serving(call)
        if kernels is None:
            convolve_drafts(call, batch, self._states)
            return
        line = keep_drafts(call, batch, self._states)
        history = line[:, : call.layer.conv_size - 1].clone()
        out = call.out.view(batch.batch_size, -1, call.out.shape[1])
        out.copy_(line[:, history.shape[1] :])
        _update(kernels, call, out.transpose(1, 2), history.transpose(1, 2))

    def _serving(self, call: ConvCall) -> ConvKernels | None:
        return self._kernels if call.layer.conv_size in TAPS and len(call.x) else None

    def _update(self, kernels: ConvKernels, call: ConvCall, batch: ForwardBatch) -> None:
        """One token a request."""
        pool, rows = self._states.conv(call.layer.layer_id, call.index), batch.req_pool_indices
        history = read_states(pool, rows, batch.seq_lens <= 1)
        call.out.copy_(call.x)
        _update(kernels, call, call.out.unsqueeze(-1), history.transpose(1, 2))
        pool.index_copy_(0, rows, history)

    def _convolve(
        self, kernels: ConvKernels, call: ConvCall, batch: ForwardBatch, step: PackedRequests
    ) -> None:
        pool, num = self._states.conv(call.layer.layer_id, call.index), step.tokens.num_tokens
        rows = batch.req_pool_indices
        before = step.start(pool, rows)
        states = step.of_active(before).transpose(1, 2).contiguous()
        call.out[num:].zero_()
        if num:
            x = call.x[:num].t().clone(memory_format=torch.contiguous_format)
            kernels.causal_conv1d_fwd(
                x,
                call.weight.contiguous(),
                call.bias,
                states,
                step.indptr,
                None,
                step.begun,
                call.silu,
                NO_PADDING,
            )
            call.out[:num] = x.t()
        step.finish(pool, rows, before, states.transpose(1, 2))


def _update(kernels: ConvKernels, call: ConvCall, x: torch.Tensor, states: torch.Tensor) -> None:
    """x: [n, C, d], which becomes the result. states: [n, C, W - 1], which become those after x."""
    kernels.causal_conv1d_update(
        x, states, call.weight.contiguous(), call.bias, call.silu, None, None, NO_PADDING
    )
