"""`causal_conv1d_fwd` and `causal_conv1d_update` of sglang-kernel 0.4.5, in plain torch.

What an adapter can notice of the real functions, from sgl_kernel/mamba.py and
sgl-kernel/csrc/mamba/causal_conv1d.cu of SGLang:

- Both write their result over x, in the dtype of x, from float32 sums; both leave the last W - 1
  inputs as the states. x, weight, bias and states have one dtype. SiLU is float32.
- `causal_conv1d_fwd` with `query_start_loc` takes x [C, T]. It reads a channel's tokens, and the
  W - 1 taps of a state [n, C, W - 1], end to end. With other W than 2 to 4 it launches nothing and
  says nothing. The states of a request without tokens are garbage, here NaN.
- `causal_conv1d_update` takes x [n, C, d] and states [n, C, L], L at least W - 1, of any strides.

`causal_conv1d_update` reads nothing on the host.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import conv1d, silu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TAPS = (2, 3, 4)


def causal_conv1d_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_: torch.Tensor | None,
    conv_states: torch.Tensor | None,
    query_start_loc: torch.Tensor | None,
    cache_indices: torch.Tensor | None,
    has_initial_state: torch.Tensor | None,
    silu_activation: bool,
    pad_slot_id: int,
) -> None:
    """Raises RuntimeError for what the library refuses, and where it would read elsewhere."""
    if query_start_loc is None or cache_indices is not None or conv_states is None:
        raise NotImplementedError("unpacked requests, and rows of states")
    if has_initial_state is None:
        raise NotImplementedError("states that nothing reads")
    channels, taps = weight.shape
    count = query_start_loc.shape[0] - 1
    _check_dtypes(x, weight, bias_, conv_states)
    _check(x.shape[0] == channels and x.dim() == 2, "x must have shape (dim, seqlen)")
    _check(query_start_loc.dtype == torch.int32, "query_start_loc must be int32")
    _check(has_initial_state.dtype == torch.bool, "has_initial_state must be bool")
    _check(has_initial_state.shape == (count,), "has_initial_state must have shape (batch)")
    _check(conv_states.shape == (count, channels, taps - 1), "illegal memory access")
    _check(x.stride(1) == 1 or x.shape[1] == 1, "tokens of a channel are read end to end")
    _check(conv_states.stride(2) == 1 or taps == 2, "taps of a state are read end to end")
    if taps not in TAPS:
        return
    bounds = query_start_loc.tolist()
    _check(bounds[-1] <= x.shape[1], "illegal memory access")
    for request, (first, last) in enumerate(pairwise(bounds)):
        history = conv_states[request].clone()
        if not has_initial_state[request]:
            history.zero_()
        line = torch.cat([history, x[:, first:last]], dim=1)
        if first == last:
            conv_states[request] = torch.nan
            continue
        conv_states[request] = line[:, last - first :]
        x[:, first:last] = _convolved(line.unsqueeze(0), weight, bias_, silu_activation)[0]


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias_: torch.Tensor | None,
    silu_activation: bool,
    cache_seqlens: torch.Tensor | None,
    conv_state_indices: torch.Tensor | None,
    pad_slot_id: int,
) -> None:
    """Raises as `causal_conv1d_fwd` does."""
    if cache_seqlens is not None or conv_state_indices is not None:
        raise NotImplementedError("circular states, and rows of states")
    channels, taps = weight.shape
    count, _, num = x.shape
    _check_dtypes(x, weight, bias_, conv_state)
    _check(weight.dtype == x.dtype, "weight type must equal to input type")
    _check(x.shape == (count, channels, num), "x must have shape (batch_size, dim, seqlen)")
    _check(taps in TAPS, "causal_conv1d only supports width between 2 and 4")
    _check(conv_state.shape[:2] == (count, channels), "conv_state must have shape (batch, dim)")
    _check(conv_state.shape[2] == taps - 1, "longer states are not emulated")
    line = torch.cat([conv_state, x], dim=2)
    conv_state.copy_(line[:, :, num:])
    x.copy_(_convolved(line, weight, bias_, silu_activation))


def _convolved(
    lines: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activated: bool
) -> torch.Tensor:
    """[n, C, d] float32 of lines [n, C, W - 1 + d]."""
    offset = None if bias is None else bias.float()
    out = conv1d(lines.float(), weight.float().unsqueeze(1), offset, groups=weight.shape[0])
    return silu(out) if activated else out


def _check_dtypes(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor
) -> None:
    _check(x.dtype in DTYPES and weight.dtype == x.dtype, "dtype of x and weight")
    _check(states.dtype == x.dtype, "dtype of the states")
    if bias is not None:
        _check(bias.dtype == weight.dtype and bias.shape == weight.shape[:1], "bias")
        _check(bias.stride(-1) == 1, "bias must be contiguous")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)
