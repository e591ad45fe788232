"""Functions that the mixers of transformers' models call, in the contract's terms.

Each function here has the arguments of one of transformers', after the mixer that calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from attnmux.core import InvalidInput
from attnmux.transformers.model.layer_call import NOT_ATTENTION
from attnmux.transformers.model.mixers.mixer import Convolution, Mixer, Recurrence

ACTIVATIONS = (None, "silu", "swish")


def _convolve(
    mixer: Mixer,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """`causal_conv1d_fn`: x [1, C, T] to [1, C, T]."""
    _refuse(mixer, kwargs)
    if activation not in ACTIVATIONS:
        raise InvalidInput(f"{mixer.name}, activation", got=activation, expected="silu or none")
    rows = row_of(mixer, x).t().contiguous()
    convolution = Convolution(x=rows, weight=weight, bias=bias, silu=activation is not None)
    return mixer.convolve(convolution).t().unsqueeze(0)


def _delta_rule(
    kind: str,
    mixer: Mixer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    output_final_state: bool = False,
    chunk_size: int = 0,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: q, k [1, T, Hk, K], v
    [1, T, Hv, V], to [1, T, Hv, V] and no final state. Both scale by the square root of K."""
    _refuse(mixer, kwargs)
    recurrence = Recurrence(
        kind=kind,
        q=row_of(mixer, query),
        k=row_of(mixer, key),
        v=row_of(mixer, value),
        g=row_of(mixer, g).float(),
        beta=row_of(mixer, beta),
        scaling=query.shape[-1] ** -0.5,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )
    return mixer.recur(recurrence).unsqueeze(0), None


def _mamba2_scan(
    mixer: Mixer,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # transformers' names
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: object,
) -> torch.Tensor:
    """`mamba2_chunk_scan`: x [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N], to
    [1, T, H, P] float32."""
    _refuse(mixer, kwargs)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    steps = row_of(mixer, dt.clamp(min=dt_limit[0], max=dt_limit[1])).float()
    x = row_of(mixer, hidden_states)
    recurrence = Recurrence(
        kind="mamba2",
        q=row_of(mixer, C),
        k=row_of(mixer, B),
        v=x,
        g=A.float() * steps,
        beta=steps,
        scaling=1.0,
        qk_l2norm=False,
    )
    out = mixer.recur(recurrence).float()
    if D is not None:
        out = out + D.unsqueeze(-1) * x.float()
    return out.unsqueeze(0)


def _selective_scan(
    mixer: Mixer,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # transformers' names
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    *,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: object,
) -> torch.Tensor:
    """`mamba_selective_scan`: x, dt and z [1, I, T], A [I, N], B and C [1, N, T], to [1, I, T].

    The last three flags choose among ways to compute the same.
    """
    _refuse(mixer, kwargs)
    x, steps, keys, queries = (row_of(mixer, tensor).t() for tensor in (hidden_states, dt, B, C))
    if delta_bias is not None:
        steps = steps + delta_bias.to(steps.dtype)
    if delta_softplus:
        steps = torch.nn.functional.softplus(steps)
    steps = steps.float()
    recurrence = Recurrence(
        kind="mamba1",
        q=queries.unsqueeze(1).contiguous(),
        k=keys.unsqueeze(1).contiguous(),
        v=x.unsqueeze(-1).contiguous(),
        g=steps.unsqueeze(-1) * A.float(),
        beta=steps,
        scaling=1.0,
        qk_l2norm=False,
    )
    out = mixer.recur(recurrence).squeeze(-1)
    if D is not None:
        out = out + x * D
    if z is not None:
        out = out * torch.nn.functional.silu(row_of(mixer, z).t())
    return out.t().unsqueeze(0)


FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "causal_conv1d_fn": _convolve,
        "torch_chunk_gated_delta_rule": partial(_delta_rule, "gdn"),
        "chunk_kimi_delta_attention": partial(_delta_rule, "kda"),
        "mamba2_chunk_scan": _mamba2_scan,
        "mamba_selective_scan": _selective_scan,
    }
)
"""Functions of transformers' models, and ours. A model without a cache calls these in every step,
and never the ones for single tokens."""


def row_of(mixer: Mixer, tensor: torch.Tensor) -> torch.Tensor:
    """The tokens of a tensor [1, T, …]. Raises InvalidInput for several rows."""
    if tensor.shape[0] != 1:
        got = f"{tensor.shape[0]} rows"
        raise InvalidInput(mixer.name, got=got, expected="the tokens of all requests in one row")
    return tensor[0]


def refuse_padding(mixer: Mixer, mask: torch.Tensor | None) -> None:
    """Raise InvalidInput for a mask of padding."""
    if mask is not None:
        expected = "none: nothing is padded"
        raise InvalidInput(f"{mixer.name}, attention_mask", got="a mask", expected=expected)


def _refuse(mixer: Mixer, kwargs: Mapping[str, object]) -> None:
    """Raise InvalidInput for an argument that the contract does not know."""
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in NOT_ATTENTION:
            expected = "nothing: linear layers through attnmux do not know this argument"
            raise InvalidInput(f"{mixer.name}, {name}", got=type(value).__name__, expected=expected)
