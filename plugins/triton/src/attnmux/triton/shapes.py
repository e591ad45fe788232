"""The shape of a layer as the kernels are compiled for it."""

from __future__ import annotations

from dataclasses import dataclass

from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec

LEAST_WIDTH = 16
"""Columns that a matrix product of Triton needs."""


def next_power_of_2(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


def halves(width: int) -> tuple[int, int]:
    """A width as a power of 2 and the rest, which is 0 for a power of 2."""
    head = 1 << (width.bit_length() - 1)
    return head, width - head


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Dims and heads. Those of K in two parts, so that 192 are 128 and 64, and not 256."""

    kv_heads: int
    group: int
    """Query heads of a KV head; in MLA all of them."""
    real_d: int
    """Columns of K's first part; in MLA the latent's."""
    real_tail: int
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
                came=f"{layer.qk_head_dim} columns of K, {layer.v_head_dim} of V",
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
        """Columns of a tile of K's first part, a power of 2."""
        return max(next_power_of_2(self.real_d), LEAST_WIDTH)

    @property
    def tail(self) -> int:
        return max(next_power_of_2(self.real_tail), LEAST_WIDTH) if self.real_tail else 0

    @property
    def dv(self) -> int:
        return max(next_power_of_2(self.real_dv), LEAST_WIDTH)

    def constants(self) -> dict[str, object]:
        """By the kernels' names."""
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
