"""Long MLA prompts with expanded heads: new tokens first, then the cached prefix in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnmux.core.arguments import check_positive
from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.choosing.measured.launches import current_launches
from attnmux.core.composites import DispatchingBackend
from attnmux.core.errors import InvalidInput
from attnmux.core.expanded_parts import Part, parts_of
from attnmux.core.kv.rows import gather_rows
from attnmux.core.latent import crossing_by_operations
from attnmux.core.layer import LayerSpec

if TYPE_CHECKING:
    from attnmux.core.choosing.ask.request import Request
    from attnmux.core.choosing.measured.launches import Value
    from attnmux.core.context import BackendContext
    from attnmux.core.latent import UpProjection

CHUNK_BYTES = 1 << 29
"""Memory for the expanded K and V of a chunk: 6,241 tokens of DeepSeek-V3's 128 heads in bfloat16,
enough for merging to take less than a twentieth of the attention."""

SHAPE = (
    *("num_q_heads", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim"),
    *("dtype", "kv_dtype"),
)
"""Fields of a request that a measured crossing holds for."""

MOST_LANES = 4
"""Expanded backends. Each keeps its part of a step prepared for all layers; the last one prepares
the chunks that are left over in every layer again."""


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
        """expanded: one or more backends of `expanded_context`, all alike; see `MOST_LANES`.
        crossing: new tokens on a long prefix from which a step runs expanded; None: as
        `crossing_by_operations` says.

        Raises InvalidInput for a backend of another context, and for no memory.
        """
        super().__init__(absorbed.context)
        num_layers, pool = 2 * len(self._specs()), self.context.token_to_kv_pool
        if not expanded or any(
            len(each.context.layers) != num_layers
            or each.context.token_to_kv_pool is not pool
            or any(layer.kind == "mla" for layer in each.context.layers)
            for each in expanded
        ):
            expected = "backends of expanded_context(absorbed.context)"
            raise InvalidInput("expanded", got="backends of another context", expected=expected)
        check_positive("chunk_bytes", chunk_bytes)
        self.absorbed = absorbed
        self.expanded = tuple(expanded)
        pairs = zip(expanded[0].context.layers[::2], expanded[0].context.layers[1::2], strict=True)
        by_spec = dict(zip(self._specs(), pairs, strict=True))
        self._layers = {layer.layer_id: by_spec[_spec(layer)] for layer in self.context.layers}
        own, _ = self._layers[self.context.layers[0].layer_id]
        self._dims = (own.tp_q_head_num, own.qk_head_dim, own.v_head_dim)
        row = own.tp_q_head_num * (own.qk_head_dim + own.v_head_dim)
        itemsize = 2 if self._dtype is None else self._dtype.itemsize
        self.chunk_tokens = max(chunk_bytes // (row * itemsize), 1)
        """Cached tokens that are expanded at once."""
        layer, nope = (
            self.context.layers[0],
            own.qk_head_dim - self.context.layers[0].qk_rope_head_dim,
        )
        if crossing is None:
            crossing = crossing_by_operations(rank=layer.v_head_dim, nope=nope, v=own.v_head_dim)
        self.crossing = crossing
        self._parts: tuple[Part, ...] = ()
        self._prepared: list[Part | None] = [None] * len(self.expanded)

    @property
    def runs_expanded(self) -> bool:
        """Whether the prepared step does."""
        return bool(self._parts)

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        """`absorbed`, for all calls but `forward_latent`."""
        return self.absorbed

    def select(self, mode: ForwardMode) -> AttentionBackend:
        return self.absorbed.select(mode)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.absorbed.init_cuda_graph_state(max_bs, max_num_tokens)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.absorbed.get_cuda_graph_seq_len_fill_value()

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        table = self.context.req_to_token_pool
        parts = parts_of(batch, table, crossing=self.crossing, chunk_tokens=self.chunk_tokens)
        self._parts = tuple(parts)
        self._prepared = [None] * len(self.expanded)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """A step in a graph is absorbed."""
        self._parts = ()
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
        if not self._parts or batch.forward_mode is ForwardMode.IDLE:
            return super().forward_latent(q, latent, k_rope, layer, batch, projection)
        self.absorbed.save_kv(latent, None, layer, batch, k_rope=k_rope)
        own, *chunks = self._parts
        lse = q.new_empty(q.shape[:2], dtype=torch.float32) if chunks else None
        out = self._attend(0, own, q, layer, projection, lse)
        if lse is None:
            return out
        merged = out.float()
        for number, part in enumerate(chunks, start=1):
            rows = part.tokens
            part_lse = torch.empty_like(lse[rows])
            out = self._attend(number, part, q[rows], layer, projection, part_lse)
            merge_into(merged[rows], lse[rows], out, part_lse)
        return merged.to(q.dtype)

    def _attend(
        self,
        number: int,
        part: Part,
        q: torch.Tensor,
        layer: LayerSpec,
        projection: UpProjection,
        lse: torch.Tensor | None,
    ) -> torch.Tensor:
        lane = min(number, len(self.expanded) - 1)
        backend = self.expanded[lane]
        if self._prepared[lane] is not part:
            backend.init_forward_metadata_out_graph(part.batch)
            backend.init_forward_metadata_in_graph(part.batch)
            self._prepared[lane] = part
        k, v = self._keys(part, layer, projection, q.dtype)
        spec = self._layers[layer.layer_id][part.is_prefix]
        return backend.forward(q, k, v, spec, part.batch, save_kv_cache=False, lse=lse)

    def _keys(
        self, part: Part, layer: LayerSpec, projection: UpProjection, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K [n, H, nope + rope] and V [n, H, v] of the part's keys.

        The pool's values are read for new tokens too: it may have rounded them.
        """
        pool, workspace = self.context.token_to_kv_pool, self.context.workspace
        buffer = pool.get_key_buffer(layer.layer_id)
        rows = gather_rows(buffer, pool.translate(part.slots, layer.layer_id)).squeeze(1).to(dtype)
        scale, _ = pool.read_scales(layer.k_scale, layer.v_scale)
        if scale != 1.0:
            rows = rows * scale
        heads, qk_dim, v_dim = self._dims
        k = workspace.tensor("chunked_prefix.k", (len(rows), heads, qk_dim), dtype)
        v = workspace.tensor("chunked_prefix.v", (len(rows), heads, v_dim), dtype)
        projection.expand(rows, k, v)
        return k, v

    def _specs(self) -> tuple[tuple[int, float, float], ...]:
        return tuple(dict.fromkeys(map(_spec, self.context.layers)))


def expanded_context(context: BackendContext) -> BackendContext:
    """The context of the expanded backends of an MLA context.

    For each scaling among its layers it has two, which no pool holds: one for new tokens and one
    for a chunk of the prefix.
    Raises InvalidInput for a request without `head_dim`, and for layers of which parts cannot be
    merged by LSE.
    """
    request = context.request.expanded_prompts()
    if request.head_dim is None:
        raise InvalidInput("head_dim", got=None, expected="the dim of the expanded heads")
    for layer in context.layers:
        limited = layer.sliding_window_size >= 0 or layer.attention_chunk_size > 0
        if layer.kind != "mla" or limited or layer.sinks is not None:
            got, expected = f"layer {layer.layer_id}", "MLA without windows, chunks or sinks"
            raise InvalidInput("layers", got=got, expected=expected)
    number = max(context.token_to_kv_pool.layer_ids) + 1
    layers: list[LayerSpec] = []
    for heads, scaling, logit_cap in dict.fromkeys(map(_spec, context.layers)):
        own = LayerSpec(
            layer_id=number + len(layers),
            tp_q_head_num=heads,
            tp_k_head_num=heads,
            tp_v_head_num=heads,
            qk_head_dim=request.head_dim,
            v_head_dim=request.v_head_dim or request.head_dim,
            scaling=scaling,
            logit_cap=logit_cap,
        )
        cross = replace(own, layer_id=own.layer_id + 1, is_cross_attention=True)
        layers += [own, cross]
    # The parts of a step contradict the request table, and the step was checked as a whole
    return replace(context, request=request, layers=tuple(layers), debug=False)


def crossing_subject(absorbed: str, request: Request) -> dict[str, Value]:
    """The subject of a `TunedLaunch` of the expanded backend that holds a measured `crossing`.

    absorbed: `plugin/name` of the other backend. Its values are {"crossing": new tokens}.
    """
    asked = {name: getattr(request, name) for name in SHAPE}
    given = {name: value for name, value in asked.items() if value is not None}
    return {"kernel": "expanded prompts", "absorbed": absorbed, **given}


def measured_crossing(expanded: str, absorbed: str, context: BackendContext) -> float | None:
    """The crossing that was measured on this machine with the versions that are installed, if any.

    expanded, absorbed: `plugin/name` of both backends.
    """
    subject = crossing_subject(absorbed, context.request)
    for each in current_launches(context.launches, expanded, context.platform):
        if dict(each.subject) == subject:
            return float(each.values["crossing"])
    return None


def merge_into(
    out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor
) -> None:
    """Add attention over other keys to `out` [T, H, D] and `lse` [T, H], both float32, in place.

    lse = logaddexp(lse, part_lse); out = e^(old lse - lse) out + e^(part_lse - lse) part. Rows of
    neither have LSE -inf.
    """
    share = torch.sigmoid(part_lse - lse).nan_to_num_(0.0)
    out.lerp_(part.float(), share.unsqueeze(-1))
    torch.logaddexp(lse, part_lse, out=lse)


def _spec(layer: LayerSpec) -> tuple[int, float, float]:
    """How the expanded layers of MLA layers may differ."""
    return layer.tp_q_head_num, layer.scaling, layer.logit_cap
