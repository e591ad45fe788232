"""The tensors that flashinfer's kernels of the gated delta rule take, made from those of a call."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attnmux.core import LinearLayerSpec

if TYPE_CHECKING:
    from attnmux.core.plugin import LinearCall

STEEPNESS = 24
"""softplus(x) differs from x by at most log 2. With a factor of 2^-24 that is within the rounding
of float32, so that a = -g * 2^24 gives g."""
STEEP = -STEEPNESS * math.log(2)
"""The logarithm of that factor, A_log."""
MOST = 80.0
"""Largest argument of softplus in `gated_delta_rule_mtp`: beyond 88 its exponential is infinite,
which it multiplies by 0. A decay of exp(-80) forgets everything."""


def decode_gates(call: LinearCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(a, b) [T, Hv] float32 with which A_log = -24 log 2 and dt_bias = 0 give g and beta."""
    return call.g * -(2.0**STEEPNESS), _logit(call)


def draft_gates(call: LinearCall) -> tuple[torch.Tensor, torch.Tensor]:
    """(a, b) [T, Hv] float32 with which A_log = dt_bias = 0 give g and beta."""
    return (-call.g).clamp(max=MOST).expm1().log().clamp(min=-MOST), _logit(call)


def normed(x: torch.Tensor, layer: LinearLayerSpec) -> torch.Tensor:
    """Q or K [T, Hk, 128] end to end, each divided by its length if the layer wants it: in
    float32, rounded once."""
    if not layer.qk_l2norm:
        return dense(x)
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square()
    return torch.mul(x, (squares + LinearLayerSpec.L2_EPS).rsqrt(), out=x.new_empty(x.shape))


def _logit(call: LinearCall) -> torch.Tensor:
    """The number whose sigmoid is beta: infinite for 0 and 1, which its exponential bears."""
    assert call.beta is not None  # of the delta rule
    return call.beta.float().logit()


def dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that kernels can load: end to end, from an aligned address."""
    is_dense = x.is_contiguous() and x.data_ptr() % 16 == 0
    return x if is_dense else x.clone(memory_format=torch.contiguous_format)


def by_request(x: torch.Tensor, count: int) -> torch.Tensor:
    """[B, T / B, ...] of a tensor [T, ...], with the strides of its shape, even in dims of 1."""
    return dense(x).reshape(-1).view(count, -1, *x.shape[1:])


def transposed(states: torch.Tensor) -> torch.Tensor:
    return states.transpose(-1, -2).contiguous()
