"""The arithmetic and the memory traffic of linear layers."""

from __future__ import annotations

from attnmux.core import LinearLayerSpec, Request
from attnmux.testing.bench.workload import Workload

STATE_ITEMSIZE = 4
"""Recurrent states are float32."""

CONV_CHANNELS, CONV_SIZE = 2048, 3
"""Channels and taps of layers of kind "conv", which no request states: those of LFM2-1.2B."""


def state_bytes(workload: Workload, request: Request, itemsize: float) -> int:
    """Bytes of the states of a step's requests in one layer.

    itemsize: bytes of a value of the dtype, in which convolutions keep their last inputs.
    """
    if request.kind == "conv":
        return round(workload.num_requests * (CONV_SIZE - 1) * CONV_CHANNELS * itemsize)
    return workload.num_requests * _state_values(request) * STATE_ITEMSIZE


def linear_flops(workload: Workload, request: Request) -> int:
    """Floating-point operations of the recurrence, or of the convolution, token by token.

    A value of the state is decayed, gets a product and gives one to the output: 5 operations, and 2
    more for the delta rule. Exponentials and the norms of q and k are not counted.
    """
    if request.kind == "conv":
        return 2 * workload.num_tokens * CONV_SIZE * CONV_CHANNELS
    each = 7 if request.kind in LinearLayerSpec.DELTA_KINDS else 5
    return each * workload.num_tokens * _state_values(request)


def linear_bytes(workload: Workload, request: Request, itemsize: float) -> int:
    """Bytes that one layer's call reads and writes: its inputs and results, and the states, which
    are read unless the requests start. Those after each draft token are written; of convolutions,
    the inputs beside those before."""
    states = state_bytes(workload, request, itemsize)
    written = states * (workload.new if workload.phase == "verify" else 1)
    if request.kind == "conv" and workload.phase == "verify":
        written = states + round(workload.num_tokens * CONV_CHANNELS * itemsize)
    states = written + (states if workload.prefix else 0)
    if request.kind == "conv":
        values = (2 * workload.num_tokens + CONV_SIZE) * CONV_CHANNELS
        return round(values * itemsize) + states
    heads, k_heads, dim, v_dim = dims(request)
    values = 2 * k_heads * dim + 2 * heads * v_dim
    decays = heads * (dim if request.kind in LinearLayerSpec.CHANNEL_KINDS else 1)
    betas = 0 if request.kind == "lightning" else heads
    token = values * itemsize + decays * STATE_ITEMSIZE + betas * itemsize
    return round(workload.num_tokens * token) + states


def dims(request: Request) -> tuple[int, int, int, int]:
    """V heads, K heads, K dims and V dims of the recurrence; zeros for kind "conv"."""
    heads, k_heads = request.num_q_heads or 0, request.num_kv_heads or 0
    dim = request.head_dim or 0
    return heads, k_heads, dim, request.v_head_dim or dim


def _state_values(request: Request) -> int:
    heads, _, dim, v_dim = dims(request)
    return heads * dim * v_dim
