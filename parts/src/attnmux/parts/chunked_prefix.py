"""Long MLA prompts with expanded heads: new tokens first, then the cached prefix in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    Decision,
    DispatchingBackend,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    KVPool,
    LayerSpec,
    Request,
    TunedLaunch,
    UpProjection,
    make_backend,
)
from attnmux.core.plugin import MakeBackend, OptionValue
from attnmux.parts.crossing import crossing_by_operations
from attnmux.parts.key_parts import KeyPart
from attnmux.parts.part_attention import PartAttention
from attnmux.parts.requests import parts_request

CHUNK_BYTES = 3 << 28
"""Memory for the expanded heads of a chunk: 7,021 tokens of DeepSeek-V3's 128 heads in bfloat16,
enough for merging to take less than a twentieth of the attention."""

SHAPE = (
    *("num_q_heads", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim"),
    *("dtype", "kv_dtype"),
)
"""Fields of a request that a measured crossing holds for."""


class ChunkedPrefixBackend(DispatchingBackend):
    """MLA by `absorbed`, except for extend steps in which expanded heads take fewer operations.

    Then `forward_latent` expands the latent to every head's K and V: the new tokens attend to
    themselves causally, and to the cached prefix chunk by chunk without a mask; each result is
    merged by its LSE. The expanded K and V of a chunk fit `chunk_bytes`, however long the prefix
    is; those of the new tokens take as much as the step is long.
    """

    def __init__(
        self,
        *,
        absorbed: AttentionBackend,
        expanded: Sequence[AttentionBackend],
        chunk_bytes: int = CHUNK_BYTES,
        crossing: float | None = None,
    ) -> None:
        """expanded: one or more backends of `expanded_context`, all alike; see
        `PartAttention.MOST_LANES`. crossing: new tokens on a long prefix from which a step runs
        expanded; None: as `crossing_by_operations` says.

        Raises InvalidInput for a backend of another context, and for no memory.
        """
        super().__init__(absorbed.context, (absorbed,))
        layers, pool = self.context.layers, self.context.token_to_kv_pool
        InvalidInput.check_at_least(1, "chunk_bytes", chunk_bytes)
        self.absorbed = absorbed
        self.expanded = tuple(expanded)
        self._parts = PartAttention[torch.Tensor](expanded, layers, pool)
        layer = layers[0]
        own, _ = self._parts.layers[layer.layer_id]
        nope = own.qk_head_dim - layer.qk_rope_head_dim
        # The product has K without its rotary part and V, and K comes once more as a whole
        row = own.tp_q_head_num * (nope + own.v_head_dim + own.qk_head_dim)
        itemsize = 2 if self._dtype is None else self._dtype.itemsize
        self.chunk_tokens = max(chunk_bytes // (row * itemsize), 1)
        """Cached tokens that are expanded at once."""
        if crossing is None:
            crossing = crossing_by_operations(rank=layer.v_head_dim, nope=nope, v=own.v_head_dim)
        self.crossing = crossing

    @property
    def runs_expanded(self) -> bool:
        """Whether the prepared step does."""
        return bool(self._parts.parts)

    def select(self, mode: ForwardMode) -> AttentionBackend:
        return self.absorbed.select(mode)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        self._parts.begin(
            KeyPart.of_step(
                batch,
                self.context.req_to_token_pool,
                page_size=self.context.token_to_kv_pool.page_size,
                crossing=self.crossing,
                chunk_tokens=self.chunk_tokens,
            )
        )

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """A step in a graph is absorbed."""
        self._parts.begin(())
        super().init_forward_metadata_out_graph(batch, in_capture)

    def forward_latent(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        projection: UpProjection,
    ) -> torch.Tensor:
        if not self.runs_expanded or batch.forward_mode is ForwardMode.IDLE:
            return super().forward_latent(q, latent, k_rope, layer, batch, projection)
        self.absorbed.save_kv(latent, None, layer, batch, k_rope=k_rope)
        own = latent.squeeze(1), k_rope.squeeze(1)
        read = partial(self._keys, layer=layer, projection=projection, own=own)
        return self._parts.attend(q, read, layer)

    def _keys(
        self,
        slots: torch.Tensor,
        layer: LayerSpec,
        projection: UpProjection,
        own: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K [n, H, nope + rope] and V [n, H, v] of the keys in slots [n].

        own: latent and rotary K of the step's new tokens. If the pool may have rounded them, its
        values are read instead.
        """
        pool, dtype = self.context.token_to_kv_pool, own[0].dtype
        buffer = pool.get_key_buffer(layer.layer_id)
        if slots is self._parts.parts[0].keys and buffer.dtype == dtype:
            return projection.expand(*own)
        rows = (
            KVPool.gather_rows(buffer, pool.translate(slots, layer.layer_id)).squeeze(1).to(dtype)
        )
        scale, _ = pool.read_scales(layer.k_scale, layer.v_scale)
        if scale != 1.0:
            rows = rows * scale
        return projection.expand_rows(rows)


def expanded_context(context: BackendContext) -> BackendContext:
    """The context of the expanded backends of an MLA context.
    Raises InvalidInput for a request without `head_dim`, and for layers whose parts cannot be
    merged by LSE.
    """
    for layer in context.layers:
        if layer.kind != "mla":
            expected = "MLA without windows and chunks"
            raise InvalidInput("layers", got=f"layer {layer.layer_id}", expected=expected)
    return PartAttention.context_of(context, parts_request(context.request))


def crossing_subject(absorbed: str, request: Request) -> dict[str, OptionValue]:
    """The subject of a `TunedLaunch` of the expanded backend that holds a measured `crossing`.

    absorbed: `plugin/name` of the other backend. Its values are {"crossing": new tokens}.
    """
    shape = {name: getattr(request, name) for name in SHAPE}
    stated = {name: value for name, value in shape.items() if value is not None}
    return {"kernel": "expanded prompts", "absorbed": absorbed, **stated}


def measured_crossing(expanded: str, absorbed: str, context: BackendContext) -> float | None:
    """The crossing that was measured on this machine with the versions that are installed, if any.

    expanded, absorbed: `plugin/name` of both backends.
    """
    subject = crossing_subject(absorbed, context.request)
    for launch in TunedLaunch.current(context.launches, expanded, context.platform):
        if dict(launch.subject) == subject:
            return float(launch.values["crossing"])
    return None


def make_expanded(
    inner: MakeBackend, decision: Decision, context: BackendContext, phases: Sequence[str]
) -> AttentionBackend:
    """The factory of the part `expanded_prompts`."""
    absorbed, served = inner(context, phases), decision.parts["expanded_prompts"]
    if not served or "extend" not in phases:
        return absorbed
    choice, of_prompts = served["prompts"]["extend"], expanded_context(context)
    return ChunkedPrefixBackend(
        absorbed=absorbed,
        expanded=[make_backend(choice, of_prompts) for _ in range(PartAttention.MOST_LANES)],
        crossing=measured_crossing(choice.address, decision.phases["extend"].address, context),
    )
