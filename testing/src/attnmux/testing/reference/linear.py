"""Linear layers in float64, token by token: the only oracle for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attnmux.core import LinearLayerSpec


def recurrence(
    layer: LinearLayerSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    new: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [T, Hv, V] and the states [B, Hv, K, V] afterwards, both float64.

    q, k, v, g, beta: as in `LinearCall`, the requests' tokens one after another. states: of each
    request before its tokens, zeros where it starts. new: tokens of each request.
    """
    group = layer.num_v_heads // layer.num_k_heads
    q, k = (_normed(each.double(), layer).repeat_interleave(group, dim=1) for each in (q, k))
    decay = g.double().exp()
    decay = decay.unsqueeze(-1) if decay.dim() == 2 else decay
    after = states.double().clone()
    out = torch.zeros_like(v, dtype=torch.float64)
    token = 0
    for request, count in enumerate(new):
        for _ in range(count):
            held = after[request] * decay[token].unsqueeze(-1)
            added = v[token].double()
            if layer.has_delta_rule:
                added = added - torch.einsum("hkv,hk->hv", held, k[token])
            if beta is not None:
                added = added * beta[token].double().unsqueeze(-1)
            after[request] = held + k[token].unsqueeze(-1) * added.unsqueeze(-2)
            out[token] = layer.scaling * torch.einsum("hkv,hk->hv", after[request], q[token])
            token += 1
    return out, after


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
    states: torch.Tensor,
    new: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs [T, C] float64, and the last W - 1 inputs [B, W - 1, C] in the dtype of states.

    x, weight, bias: as in `ConvCall`. states: the inputs before each request's tokens, oldest
    first, zeros where it starts.
    """
    out = torch.zeros_like(x, dtype=torch.float64)
    after = states.clone()
    token = 0
    for request, count in enumerate(new):
        window = torch.cat([states[request].double(), x[token : token + count].double()])
        for place in range(count):
            taps = window[place : place + weight.shape[1]]
            out[token + place] = (taps * weight.double().t()).sum(0)
        after[request] = window[count:].to(states.dtype)
        token += count
    if bias is not None:
        out[:token] += bias.double()
    return torch.nn.functional.silu(out) if silu else out, after


def _normed(x: torch.Tensor, layer: LinearLayerSpec) -> torch.Tensor:
    if not layer.qk_l2norm:
        return x
    return x / (x.square().sum(-1, keepdim=True) + LinearLayerSpec.L2_EPS).sqrt()
