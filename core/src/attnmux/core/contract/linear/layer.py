"""One recurrent or convolutional layer: its description, and its calls with their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import msgspec
import torch

from attnmux.core.contract.arguments import check_tensor
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.values import LinearKind


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LinearLayerSpec:
    """One layer whose memory of earlier tokens is a state of fixed size, on this rank.

    Every kind but "conv" has for each V head a state S [K, V], which starts from zeros:

        S = exp(g) * S
        u = beta * (v - S^T k) in "gdn" and "kda", beta * v in the others
        S = S + k u^T
        o = scaling * S^T q

    g is a number for each V head; in "kda" and "mamba1" for each of its K channels. V head h uses
    the Q and K of head h // (num_v_heads / num_k_heads). In "mamba1" and "mamba2", q, k, v, beta
    and g are C, B, x, dt and A * dt, and the model adds D * x itself; in "mamba1" every channel of
    x is a head of its own, with a V of one dim. "lightning" has a constant g and no beta.

    `conv_dims` describes the layer's short causal convolutions, each over its own channels. They
    are all that a layer of kind "conv" has.
    Raises InvalidInput for values that contradict each other.
    """

    DELTA_KINDS: ClassVar = frozenset({"gdn", "kda"})
    """Kinds that subtract the state's value for a key before they add the new one."""
    CHANNEL_KINDS: ClassVar = frozenset({"kda", "mamba1"})
    """Kinds whose decay is a number for each K channel of a head."""
    L2_EPS: ClassVar = 1e-6
    """Added to a sum of squares before its root, see `qk_l2norm`. Source: the l2norm of
    flash-linear-attention, which transformers' models call or repeat."""

    layer_id: int
    """Unique among the linear layers of a context; attention layers count by themselves."""
    kind: LinearKind
    num_k_heads: int = 0
    num_v_heads: int = 0
    head_k_dim: int = 0
    head_v_dim: int = 0
    scaling: float = 1.0
    qk_l2norm: bool = False
    """Whether the backend divides each q and k by its length, sqrt(sum of squares + L2_EPS)."""
    conv_dims: tuple[int, ...] = ()
    """Channels of each convolution, in the order of the calls."""
    conv_size: int = 0
    """Taps W of each convolution: a token sees itself and the W - 1 tokens before it."""

    def __post_init__(self) -> None:
        shape = (self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        if self.has_state != all(size > 0 for size in shape) or (not self.has_state and any(shape)):
            expected = "heads and dims above 0" if self.has_state else "no heads and no dims"
            raise InvalidInput("layer", got=f"{shape} in kind {self.kind!r}", expected=expected)
        if self.has_state and self.num_v_heads % self.num_k_heads:
            got = f"{self.num_v_heads} V heads over {self.num_k_heads} K heads"
            raise InvalidInput("num_v_heads", got=got, expected="a multiple of the K heads")
        if not self.has_state and not self.conv_dims:
            raise InvalidInput("conv_dims", got=(), expected="a convolution in kind 'conv'")
        for dim in self.conv_dims:
            InvalidInput.check_at_least(1, "conv_dims", dim)
        if self.conv_dims:
            InvalidInput.check_at_least(1, "conv_size", self.conv_size)

    @property
    def has_state(self) -> bool:
        """Whether it has a recurrent state, as every kind but "conv" has."""
        return self.kind != "conv"

    @property
    def has_delta_rule(self) -> bool:
        return self.kind in self.DELTA_KINDS

    @property
    def decay_shape(self) -> tuple[int, ...]:
        """Shape of a token's g: [Hv], in `CHANNEL_KINDS` [Hv, K]."""
        heads = (self.num_v_heads,)
        return (*heads, self.head_k_dim) if self.kind in self.CHANNEL_KINDS else heads


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
    """Place of the convolution in `layer.conv_dims`."""
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
        ("out", call.out, values, q.dtype),
    ):
        check_tensor(name, tensor, shape, q.device, dtype)
    if call.beta is not None:
        check_tensor("beta", call.beta, heads, q.device)
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
