"""One linear layer's calls, as `LinearAttentionBackend` passes them on, and their checks."""

from __future__ import annotations

import msgspec
import torch

from attnmux.core.arguments import check_tensor
from attnmux.core.errors import InvalidInput
from attnmux.core.linear_layer import LinearLayerSpec


class LinearCall(msgspec.Struct, frozen=True, eq=False):
    """The checked arguments of one layer's recurrence over a step's T tokens."""

    q: torch.Tensor
    """[T, Hk, K]"""
    k: torch.Tensor
    """[T, Hk, K]"""
    v: torch.Tensor
    """[T, Hv, V]"""
    g: torch.Tensor
    """The logarithm of the decay, at most 0: [T, Hv] float32, in kinds "kda" and "mamba1"
    [T, Hv, K]."""
    beta: torch.Tensor | None
    """[T, Hv]; None is 1."""
    layer: LinearLayerSpec
    out: torch.Tensor
    """[T, Hv, V] in the dtype of v."""


class ConvCall(msgspec.Struct, frozen=True, eq=False):
    """The checked arguments of one convolution over a step's T tokens."""

    x: torch.Tensor
    """[T, C]; a token's channels are contiguous."""
    weight: torch.Tensor
    """[C, W]; the last tap is the token's own."""
    bias: torch.Tensor | None
    """[C]"""
    silu: bool
    """Whether the result goes through SiLU."""
    layer: LinearLayerSpec
    index: int
    """Of the convolution in `layer.conv_dims`."""
    out: torch.Tensor
    """[T, C], contiguous."""


def check_linear(call: LinearCall, num_tokens: int) -> None:
    """Raise InvalidInput unless the tensors fit the layer and the number of tokens."""
    layer, q = call.layer, call.q
    keys = (num_tokens, layer.num_k_heads, layer.head_k_dim)
    values = (num_tokens, layer.num_v_heads, layer.head_v_dim)
    heads = (num_tokens, layer.num_v_heads)
    decay = (num_tokens, *layer.decay_shape)
    if layer.has_delta_rule and call.beta is None:
        raise InvalidInput("beta", got=None, expected=f"shape {heads} in kind {layer.kind!r}")
    for name, tensor, shape, dtype in (
        ("q", q, keys, q.dtype),
        ("k", call.k, keys, q.dtype),
        ("v", call.v, values, q.dtype),
        ("g", call.g, decay, torch.float32),
        ("beta", call.beta, heads, None),
        ("out", call.out, values, q.dtype),
    ):
        if tensor is not None:
            check_tensor(name, tensor, shape, q.device, dtype)
    for name, tensor in (("q", q), ("k", call.k), ("v", call.v), ("out", call.out)):
        apart = tensor.shape[-2] > 1 and tensor.stride(-2) != tensor.shape[-1]
        if tensor.stride(-1) != 1 or apart:
            got = f"strides {tensor.stride()}"
            raise InvalidInput(name, got=got, expected="each token's heads contiguous")


def check_conv(call: ConvCall, num_tokens: int) -> None:
    """Raise InvalidInput unless the tensors fit the layer's convolution and the tokens."""
    layer, x = call.layer, call.x
    if not 0 <= call.index < len(layer.conv_dims):
        expected = f"one of the layer's {len(layer.conv_dims)} convolutions"
        raise InvalidInput("index", got=call.index, expected=expected)
    channels = layer.conv_dims[call.index]
    for name, tensor, shape in (
        ("x", x, (num_tokens, channels)),
        ("weight", call.weight, (channels, layer.conv_size)),
        ("bias", call.bias, (channels,)),
        ("out", call.out, (num_tokens, channels)),
    ):
        if tensor is not None:
            check_tensor(name, tensor, shape, x.device, x.dtype)
    if x.stride(-1) != 1:
        raise InvalidInput("x", got=f"strides {x.stride()}", expected="contiguous channels")
