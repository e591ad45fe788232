"""FlashAttention 3's kernels, and layers as they take them: `fa3`, `fa3_mla` and `nsa_fa3`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from attnmux.core import BackendFailed, InvalidInput
from attnmux.core.plugin import KeyGroup, LatentRows, PageTables

if TYPE_CHECKING:
    from attnmux.core import BackendContext, LayerSpec

KV = tuple[torch.Tensor, torch.Tensor]
"""K and V [pages, page, Hkv, D] as the kernels take them: views of the pool's memory."""
CHUNKS, SINKS = "attention chunks", "sinks"
SINKS_OF_MIXED_DIMS = "sinks over V of other dims than K"
MOST_SPLITS = 256
"""Parts of a request's keys that the library merges."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FA3Kernels:
    """Functions of `sgl_kernel` and `sgl_kernel.flash_attn`."""

    flash_attn_with_kvcache: Callable[..., Any]
    """Attention over a paged cache."""
    flash_attn_varlen_func: Callable[..., Any]
    """Attention over packed K and V. It takes a page table and ignores it."""
    merge_state_v2: Callable[..., Any]
    """Merges attention over two sets of keys: outputs and natural-logarithm LSE [T, H] of each.
    It assumes contiguous rows, and keys in at least one of the sets."""
    get_scheduler_metadata: Callable[..., torch.Tensor]
    """The schedule, which `flash_attn_with_kvcache` computes itself unless given."""
    lacks: frozenset[str] = frozenset()
    """Which of CHUNKS, SINKS and SINKS_OF_MIXED_DIMS a build of the kernels has not."""

    def check_features(self, layer: LayerSpec, address: str) -> None:
        """Raises BackendFailed for a layer that needs a feature that the build lacks, so that the
        next build or the next backend is tried."""
        has_sinks = layer.sinks is not None
        needed = {
            CHUNKS: layer.attention_chunk_size > 0,
            SINKS: has_sinks,
            SINKS_OF_MIXED_DIMS: has_sinks and layer.qk_head_dim != layer.v_head_dim,
        }
        missing = [name for name in self.lacks if needed[name]]
        if missing:
            raise BackendFailed(
                address,
                f"layer {layer.layer_id} has {' and '.join(missing)}, which this build lacks",
                hint="pip install 'attnmux-nvidia[fa3]'",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FA3Schedule:
    """The facts of a layer that decide the library's schedule of a step.

    If all requests have as many queries, a call launches two kernels: one lays out the work by
    the lengths, the other attends. The layout is computed once for all layers that are equal here.
    That saves a launch if the library splits keys; if it does not, a launch that resets a
    counter takes its place.
    """

    group: KeyGroup
    num_heads: int
    num_heads_k: int
    headdim: int
    options: tuple[tuple[str, object], ...]
    """Keyword arguments of `get_scheduler_metadata`."""

    def compute(self, kernels: FA3Kernels, tables: PageTables) -> torch.Tensor:
        """Up to 4 vectors of B rounded up to a multiple of 4, and a counter: int32."""
        keys = tables.keys[self.group]
        return kernels.get_scheduler_metadata(
            tables.batch_size,
            tables.queries_each,
            # Attention assumes the same: the room in the table.
            keys.page_table.shape[1] * self.group.page_size,
            self.num_heads,
            self.num_heads_k,
            self.headdim,
            keys.lens,
            page_size=self.group.page_size,
            **dict(self.options),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FA3Cache:
    """Where the keys of a layer are."""

    group: KeyGroup
    pages: KV
    slots: KV
    """The same memory in pages of one token, for the keys of draft trees."""
    schedule: FA3Schedule

    @classmethod
    def of(
        cls,
        layer: LayerSpec,
        context: BackendContext,
        pages: Callable[[LayerSpec, int], KV],
        arguments: dict[str, Any],
        *,
        headdim: int,
    ) -> FA3Cache:
        """pages: the layer's K and V in pages of a given size. arguments: see `FA3Layer`.
        headdim: of the library's K."""
        group = KeyGroup.of(layer, context)
        shared = ("causal", "window_size", "attention_chunk", "num_splits")
        options = {
            "qkv_dtype": context.token_to_kv_pool.dtype,
            "headdim_v": layer.v_head_dim,
            "has_softcap": arguments["softcap"] > 0,
            **{name: arguments[name] for name in shared},
        }
        schedule = FA3Schedule(
            group=group,
            num_heads=layer.tp_q_head_num,
            num_heads_k=layer.tp_k_head_num,
            headdim=headdim,
            options=tuple(options.items()),
        )
        return cls(
            group=group,
            pages=pages(layer, group.page_size),
            slots=pages(layer, 1),
            schedule=schedule,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FA3Layer:
    """A layer's arguments that no step changes."""

    layer: LayerSpec
    arguments: dict[str, Any]
    """By the library's names."""
    cache: FA3Cache | None
    """None if K and V always come with the call."""
    descales: KV | None = None
    """[1, Hkv] float32: the factors of K and V in e4m3. The kernels then want Q in e4m3 and write
    bfloat16."""

    @property
    def serves_trees(self) -> bool:
        """Whether only the mask of a draft tree hides keys, and its two parts can be merged."""
        layer = self.layer
        hides = layer.sliding_window_size >= 0 or layer.attention_chunk_size > 0
        return not hides and layer.sinks is None and not layer.is_cross_attention


def rotary_and_latent(context: BackendContext, layer: LayerSpec, page_size: int) -> KV:
    """[pages, page, 1, 64] and [pages, page, 1, 512], in rows of 576 values."""
    rows = context.latent_pages(layer, page_size)
    return rows[..., LatentRows.LATENT_DIM :], rows[..., : LatentRows.LATENT_DIM]


def read_num_splits(context: BackendContext, options: Mapping[str, object]) -> int:
    """Parts of a request's keys; 0 lets the library choose by shapes, which graphs can capture.

    Its choice counts the requests, so results that must not depend on the batch take one part.
    """
    num_splits = cast("int", options.get("num_splits", 0))
    if not 0 <= num_splits <= MOST_SPLITS:
        raise InvalidInput("num_splits", got=num_splits, expected=f"0 to {MOST_SPLITS}")
    return 1 if context.request.deterministic else num_splits
