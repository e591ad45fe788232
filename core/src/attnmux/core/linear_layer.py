"""The description of one recurrent or convolutional layer."""

from __future__ import annotations

from dataclasses import dataclass

from attnmux.core.arguments import check_positive
from attnmux.core.choosing.ask.values import LinearKind
from attnmux.core.errors import InvalidInput

DELTA_KINDS = frozenset({"gdn", "kda"})
"""Kinds that subtract what the state already holds for a key before they add its value."""

L2_EPS = 1e-6
"""Added to a sum of squares before its root, see `LinearLayerSpec.qk_l2norm`. Source: the l2norm of
flash-linear-attention, which transformers' models call or repeat."""

CHANNEL_KINDS = frozenset({"kda", "mamba1"})
"""Kinds whose decay is a number for each K channel of a head."""


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
            check_positive("conv_dims", dim)
        if self.conv_dims:
            check_positive("conv_size", self.conv_size)

    @property
    def has_state(self) -> bool:
        """Whether it has a recurrent state, as every kind but "conv" has."""
        return self.kind != "conv"

    @property
    def has_delta_rule(self) -> bool:
        return self.kind in DELTA_KINDS

    @property
    def decay_shape(self) -> tuple[int, ...]:
        """Shape of a token's g: [Hv], in `CHANNEL_KINDS` [Hv, K]."""
        heads = (self.num_v_heads,)
        return (*heads, self.head_k_dim) if self.kind in CHANNEL_KINDS else heads
