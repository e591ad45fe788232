"""The shape of a layer as the kernels are compiled for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attnmux.core import InvalidInput, LayerSpec

LEAST_WIDTH = 16
"""Triton's matrix products need at least this many rows and columns."""

Width = Literal["narrow", "wide", "latent"]
"""The wider of K and V: up to 128 columns, up to 256, more."""


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def halves(width: int) -> tuple[int, int]:
    """The largest power of 2 in a width, and the rest."""
    head = 1 << (width.bit_length() - 1)
    return head, width - head


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Dims and heads. K has two parts, so that 192 columns are computed as 128 + 64 and not as 256.

    A `real_` width counts the layer's columns. The width without the prefix is that of a tile: the
    next power of 2, at least LEAST_WIDTH.
    """

    kv_heads: int
    group: int
    """Query heads of a KV head; in MLA all query heads."""
    real_d: int
    """Columns of K's first part; in MLA the latent's."""
    real_tail: int
    """Columns of K's second part, 0 without one; in MLA the rotary key's."""
    real_dv: int
    is_latent: bool
    """V is K's first part."""

    @classmethod
    def of(cls, layer: LayerSpec) -> Shape:
        """Raises InvalidInput for dims beyond those of the card."""
        is_latent = layer.kind == "mla"
        if is_latent:
            head, tail = layer.v_head_dim, layer.qk_rope_head_dim
        else:
            head, tail = halves(layer.qk_head_dim)
        if layer.qk_head_dim > 576 or layer.v_head_dim > 512:
            raise InvalidInput(
                f"layer {layer.layer_id}",
                got=f"{layer.qk_head_dim} columns of K, {layer.v_head_dim} of V",
                expected="at most 576 and 512",
            )
        return cls(
            kv_heads=layer.tp_k_head_num,
            group=layer.tp_q_head_num // layer.tp_k_head_num,
            real_d=head,
            real_tail=tail,
            real_dv=layer.v_head_dim,
            is_latent=is_latent,
        )

    @property
    def d(self) -> int:
        return max(next_power_of_2(self.real_d), LEAST_WIDTH)

    @property
    def tail(self) -> int:
        return max(next_power_of_2(self.real_tail), LEAST_WIDTH) if self.real_tail else 0

    @property
    def dv(self) -> int:
        return max(next_power_of_2(self.real_dv), LEAST_WIDTH)

    @property
    def dims(self) -> tuple[int, int]:
        """Columns of K and of V."""
        return self.real_d + self.real_tail, self.real_dv

    @property
    def width(self) -> Width:
        widest = max(self.d, self.dv)
        if widest <= 128:
            return "narrow"
        return "wide" if widest <= 256 else "latent"

    def constants(self) -> dict[str, object]:
        """The kernels' constants, by their names there."""
        return {
            "GROUP": self.group,
            "D": self.d,
            "REAL_D": self.real_d,
            "TAIL": self.tail,
            "REAL_TAIL": self.real_tail,
            "DV": self.dv,
            "REAL_DV": self.real_dv,
            "IS_LATENT": self.is_latent,
        }
