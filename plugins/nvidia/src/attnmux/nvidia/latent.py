"""Layers of MLA as the kernels see them, and the base of the backends that only decode them.

A row of the cache is a token's latent and its rotary key.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

from attnmux.core import ForwardMode, GraphUnsupported, InvalidInput, LibraryBackend
from attnmux.nvidia.decode_steps import DecodeBuffers, DecodeStep
from attnmux.nvidia.page_tables import KeyGroup
from attnmux.nvidia.rows import is_aligned

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

RANK = 512
"""Dim of the latent, which is V too: every kernel for MLA is built for this one."""
ROPE = 64
"""Dim of the rotary part, which follows the latent in a row."""

K = TypeVar("K")
L = TypeVar("L")
S = TypeVar("S", bound=DecodeStep)
B = TypeVar("B", bound=DecodeBuffers)


def check_latent(layer: LayerSpec) -> None:
    """Raises InvalidInput for a layer that is not MLA with a latent of 512 and a rope of 64."""
    if layer.kind != "mla" or (layer.v_head_dim, layer.qk_rope_head_dim) != (RANK, ROPE):
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=f"{layer.kind}, {layer.v_head_dim} + {layer.qk_rope_head_dim} dims",
            expected=f"mla, {RANK} + {ROPE}",
        )


def check_plain(layer: LayerSpec) -> None:
    """Raises InvalidInput for a layer that is more than scaled, causal softmax attention."""
    extras = {
        "is_causal False": not layer.is_causal,
        "is_cross_attention": layer.is_cross_attention,
        f"logit_cap {layer.logit_cap}": layer.logit_cap > 0,
        f"sliding_window_size {layer.sliding_window_size}": layer.sliding_window_size >= 0,
        f"attention_chunk_size {layer.attention_chunk_size}": layer.attention_chunk_size > 0,
        "sinks": layer.sinks is not None,
    }
    found = [name for name, is_set in extras.items() if is_set]
    if found:
        raise InvalidInput(
            f"layer {layer.layer_id}",
            got=" and ".join(found),
            expected="causal self-attention without cap, window, chunks and sinks",
        )


def latent_layers(context: BackendContext) -> tuple[LayerSpec, ...]:
    """The context's layers of MLA, at least one, all of which `check_latent` accepts.

    The others belong to the expanded prefill, which decoding never calls.
    Raises InvalidInput where there is none, and for dims that no kernel is built for.
    """
    layers = tuple(layer for layer in context.layers if layer.kind == "mla")
    if not layers:
        kinds = sorted({layer.kind for layer in context.layers})
        raise InvalidInput("layers", got=f"those of {kinds}", expected="one of mla or more")
    for layer in layers:
        check_latent(layer)
    return layers


def latent_pages(layer: LayerSpec, context: BackendContext, page_size: int) -> torch.Tensor:
    """[pages, page_size, 1, 576]: the pool's buffer of the layer, a view.

    page_size: the pool's own, or one that divides it.
    """
    buffer = context.token_to_kv_pool.get_key_buffer(layer.layer_id)
    return buffer.view(-1, page_size, *buffer.shape[1:])


def rotary(q_rope: torch.Tensor | None) -> torch.Tensor:
    """The rotary part of the queries, [T, Hq, 64]. Raises InvalidInput where it is missing."""
    if q_rope is None:
        raise InvalidInput("q_rope", got=None, expected=f"the rotary part [T, Hq, {ROPE}]")
    return q_rope


def joined(q: torch.Tensor, q_rope: torch.Tensor | None) -> torch.Tensor:
    """Queries [T, Hq, 576] for kernels that take both parts as one row.

    Nothing is copied where the parts lie end to end in rows that kernels can load.

    q: [T, Hq, 512]. q_rope: [T, Hq, 64].
    Raises InvalidInput where q_rope is missing.
    """
    q_rope = rotary(q_rope)
    if _are_one_row(q, q_rope):
        return q.as_strided((*q.shape[:2], RANK + ROPE), q.stride())
    return torch.cat([q, q_rope], dim=-1)


def _are_one_row(q: torch.Tensor, q_rope: torch.Tensor) -> bool:
    width = RANK + ROPE
    strides = (q.shape[1] * width, width, 1)
    if q.stride() != strides or q_rope.stride() != strides:
        return False
    # As far apart in their storages as in memory: the storage is the same.
    return (
        q_rope.storage_offset() == q.storage_offset() + RANK
        and q_rope.data_ptr() == q.data_ptr() + RANK * q.element_size()
        and is_aligned(q)
    )


class LatentDecodeBackend(LibraryBackend[K, L, S, B]):
    """The base of backends that decode, verify or draft over latents, and never prefill."""

    modes: ClassVar[tuple[ForwardMode, ...]]
    """The steps that the kernels serve."""

    def __init__(self, context: BackendContext, options: Mapping[str, object], kernels: K) -> None:
        """Raises InvalidInput for options, layers and pools that the kernels do not serve."""
        layers = latent_layers(context)
        super().__init__(context, options, kernels, layers)
        self._groups = tuple(dict.fromkeys(KeyGroup.of(layer, context) for layer in layers))

    @abstractmethod
    def plan_decode(self, batch: ForwardBatch, buffers: B | None) -> S:
        """As `plan_step`, for a step of one of `modes`."""

    def plan_step(self, batch: ForwardBatch, buffers: B | None) -> S:
        mode = batch.forward_mode
        if mode not in self.modes:
            raise InvalidInput(
                "forward_mode",
                got=mode.name,
                expected=f"{' or '.join(each.name for each in self.modes)}: other steps are for "
                "the backends of their phases",
            )
        if buffers is not None and mode.is_draft_extend():
            raise GraphUnsupported(
                "graphs hold steps with the same number of new tokens for every request: run "
                "DRAFT_EXTEND eagerly"
            )
        return self.plan_decode(batch, buffers)

    def fill_step(self, step: S, batch: ForwardBatch) -> None:
        step.fill(batch, self._groups, self.context)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if call.has_own_kv:
            raise InvalidInput(
                "save_kv_cache", got=False, expected="True: the kernels read only the pool"
            )
        return super().forward_extend(call, batch)
