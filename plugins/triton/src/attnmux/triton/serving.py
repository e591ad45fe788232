"""The kernels that launches name: what each serves, and where it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch
import triton

from attnmux.core.layer import LayerSpec
from attnmux.triton.launch_types import HOPPER, HOPPER_LATENT, PORTABLE
from attnmux.triton.operands import Keys, has_whole_rows
from attnmux.triton.shapes import Shape

GLUON_RELEASE = "3.6."
"""What the kernels for Hopper are written in is experimental: each release has another."""
HALVES = (torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
DIMS = (64, 128)
"""Columns that the kernels for Hopper are written for."""
LATENT_DIMS = (512, 64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What a layer asks of a kernel, whatever the step."""

    layer: LayerSpec
    shape: Shape
    dtype: torch.dtype | None
    """Of Q; None where nothing was decided."""
    keys: Keys | None
    """The pool's, for a layer that it stores."""
    page_size: int
    """Of the table of slots."""

    @property
    def key_dtype(self) -> torch.dtype | None:
        return self.dtype if self.keys is None else self.keys.k.dtype

    @property
    def key_bits(self) -> int:
        """Of an element of K; keys of which nothing is known are 16-bit floats."""
        return 16 if self.key_dtype is None else 8 * self.key_dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionKernel:
    """A kernel under the name that launches have for it."""

    address: str
    """module:name."""
    serves: Callable[[Asked], bool]
    hides: bool = True
    """Serves custom masks, and items that do not see each other."""
    takes_whole_rows: bool = False
    """Copies 16 bytes at a time: rows have to begin at multiples of them, see `whole_rows`."""
    leaves_parts: bool = False
    """`LatentMerge` merges what its programs did not see alone."""


def _always(asked: Asked) -> bool:
    return True


def _serves_rows(asked: Asked) -> bool:
    """K and V as wide as each other, Q of 16 bits."""
    shape, keys = asked.shape, asked.keys
    return (
        asked.dtype in HALVES
        and (shape.real_d in DIMS and shape.real_d == shape.real_dv)
        and not (shape.is_latent or shape.real_tail)
        and (keys is None or (has_whole_rows(keys.k) and has_whole_rows(keys.v)))
    )


def _serves_shares(asked: Asked) -> bool:
    return _serves_rows(asked) and asked.key_dtype in (asked.dtype, *EIGHT_BITS)


def _serves_tiles(asked: Asked) -> bool:
    # Logits are compared before they are scaled.
    return _serves_rows(asked) and asked.key_dtype == asked.dtype and asked.layer.scaling > 0


def _serves_latent(asked: Asked) -> bool:
    shape, layer, keys = asked.shape, asked.layer, asked.keys
    return (
        asked.dtype in HALVES
        and (shape.is_latent and (shape.real_d, shape.real_tail) == LATENT_DIMS)
        and (keys is not None and keys.k.dtype == asked.dtype and has_whole_rows(keys.k))
        and (layer.is_causal and not layer.is_cross_attention and layer.scaling > 0)
        and (layer.sliding_window_size < 0 and layer.attention_chunk_size <= 0)
        and (layer.logit_cap <= 0 and layer.sinks is None)
        and asked.page_size == 1
    )


KERNELS = "attnmux.triton.kernels"
TILES: Mapping[str, AttentionKernel] = {
    PORTABLE: AttentionKernel(address=f"{KERNELS}.tiles:attend_tiles", serves=_always),
    HOPPER: AttentionKernel(
        address=f"{KERNELS}.hopper_tiles:attend_hopper_tiles",
        serves=_serves_tiles,
        hides=False,
        takes_whole_rows=True,
    ),
}
SHARES: Mapping[str, AttentionKernel] = {
    PORTABLE: AttentionKernel(address=f"{KERNELS}.shares:attend_shares", serves=_always),
    HOPPER: AttentionKernel(
        address=f"{KERNELS}.hopper_shares:attend_shares",
        serves=_serves_shares,
        takes_whole_rows=True,
    ),
    HOPPER_LATENT: AttentionKernel(
        address=f"{KERNELS}.hopper_latent:attend_latent",
        serves=_serves_latent,
        hides=False,
        takes_whole_rows=True,
        leaves_parts=True,
    ),
}


def serving(table: Mapping[str, AttentionKernel], asked: Asked, *, hides: bool) -> frozenset[str]:
    """Names of the kernels that serve a layer. hides: in steps with a custom mask or items."""
    return frozenset(
        name
        for name, kernel in table.items()
        if (kernel.hides or not hides)
        and kernel.serves(asked)
        and (name == PORTABLE or can_compile(kernel.address))
    )


def can_compile(address: str) -> bool:
    """Whether this Triton has what a kernel is written in, beyond Triton's own language."""
    # The interpreter knows that language alone.
    return (
        not triton.knobs.runtime.interpret
        and triton.__version__.startswith(GLUON_RELEASE)
        and _is_importable(address)
    )


def kernel_at(address: str) -> Any:  # noqa: ANN401  # a JITFunction or what interprets one
    return resolve_name(address)


@cache
def _is_importable(address: str) -> bool:
    try:
        kernel_at(address)
    except ImportError:
        return False
    return True
