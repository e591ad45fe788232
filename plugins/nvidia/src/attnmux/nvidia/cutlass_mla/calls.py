"""What the library is told at every call of one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.latent import check_latent, check_plain, latent_pages
from attnmux.nvidia.page_tables import KeyGroup
from attnmux.nvidia.pools import check_page_size, check_sixteen_bits

PAGE = 128
"""Tokens of a page: a tile of the kernel's, so that a table may have any number of columns."""
MOST_HEADS = 128
"""Query heads that the kernel computes; the library pads fewer to these."""
MOST_SPLITS = 256
"""Parts of one request that the kernel puts together again (sm100_mla.hpp)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerCall:
    """A layer's arguments that no step changes."""

    group: KeyGroup
    cache: torch.Tensor
    """[pages, 128, 576], the pool's memory."""
    scale: float

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> LayerCall:
        """Raises InvalidInput for other layers than a latent's, for more than 128 heads, for other
        pages than of 128 tokens, and for a KV dtype that is not Q's."""
        check_latent(layer)
        check_plain(layer)
        check_page_size(context, PAGE)
        check_sixteen_bits(context)
        if layer.tp_q_head_num > MOST_HEADS:
            raise InvalidInput(
                f"layer {layer.layer_id}",
                came=f"{layer.tp_q_head_num} query heads",
                expected=f"at most {MOST_HEADS}",
            )
        return cls(
            group=KeyGroup.of(layer, context),
            cache=latent_pages(layer, context, PAGE).squeeze(2),
            scale=layer.scaling,
        )


def read_num_kv_splits(options: Mapping[str, object]) -> int:
    """The option `num_kv_splits`. Raises InvalidInput for a number that means nothing."""
    splits = options.get("num_kv_splits", 1)
    if not isinstance(splits, int) or not (splits == -1 or 1 <= splits <= MOST_SPLITS):
        raise InvalidInput(
            "num_kv_splits", came=splits, expected=f"1 to {MOST_SPLITS}, or -1 for the kernel's"
        )
    return splits
