"""A correct, slow backend with its card, and a platform of a made-up vendor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    BackendContext,
    ForwardBatch,
    LayerSpec,
    Platform,
)
from attnmux.core.plugin import ANY, NONE, BackendCard, Clause, Condition, one_of
from attnmux.testing.reference.dense import (
    chunks_before,
    dense_attention,
    drafts_seen,
    expand_dual_chunk,
    topk_mask,
    visibility,
)
from attnmux.testing.reference.wide_rows import wide_rows

_DTYPES = one_of("bfloat16", "float16", "float32")
_KV_DTYPES = one_of("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz")


def fake_platform() -> Platform:
    """A platform of a made-up vendor, whose tensors are on the CPU."""
    return Platform(
        vendor="fake", device_type="cpu", arch="fake1", version=(1, 0), runtime="fake 1.0"
    )


def tree_positions(
    batch: ForwardBatch, request: int, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Positions of a request's drafts, those of all keys, and the drafts that each draft sees.

    places: [d], of the drafts in the row. Other steps get them back, and None.
    """
    trees = drafts_seen(batch)
    if trees is None:
        return places, None, None
    positions = places[:1] + trees[request].sum(1) - 1
    before = torch.arange(int(places[0]), device=places.device)
    return positions, torch.cat([before, positions]), trees[request]


def fake_card(**changes: Condition) -> BackendCard:
    """The card of `FakeBackend`, which serves the whole contract except graphs.

    `changes` narrow or widen its one clause.
    """
    everything: dict[str, Condition] = dict.fromkeys(Clause.__dataclass_fields__, ANY)
    clause = Clause(
        **{
            **everything,
            "vendor": one_of("fake"),
            "kind": one_of("mha", "mla", "nsa", "dual_chunk"),
            "phase": one_of("extend", "decode", "verify", "draft", "encoder"),
            "dtype": _DTYPES,
            "kv_dtype": _KV_DTYPES,
            "graph": NONE,
            **changes,
        }
    )
    return BackendCard(
        name="fake",
        summary="The float64 reference as a backend",
        factory="attnmux.testing.fakes.backend:FakeBackend",
        tree_masks=BackendCard.TREE_MASKS,
        clauses=(clause,),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RawMetadata:
    """A step's lengths, from its batch."""

    rows: torch.Tensor
    new: torch.Tensor
    cached: torch.Tensor
    encoder: torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FullMetadata:
    """A step's metadata: a table of slots, and lengths."""

    slots: torch.Tensor
    """[B, max_context_len]: each request's row of the request table."""
    new: torch.Tensor
    cached: torch.Tensor
    encoder: torch.Tensor


class FakeBackend(AttentionBackend):
    """The float64 reference as a backend.

    Its layers read lengths and slots only from the metadata, never from the batch, so that a step
    which was not prepared gives wrong numbers, as with a real backend. Each decision that a backend
    can get wrong is a method that tests override.
    """

    def __init__(
        self, context: BackendContext, options: Mapping[str, object] = AttentionBackend.NO_OPTIONS
    ) -> None:
        super().__init__(context, options)
        self.raw: RawMetadata | None = None
        self.full: FullMetadata | None = None

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        new, cached = batch.extend_seq_lens, batch.extend_prefix_lens
        if new is None or cached is None:
            new = torch.ones_like(batch.seq_lens)
            cached = batch.seq_lens - 1
        encoder = batch.encoder_lens
        self.raw = RawMetadata(
            rows=batch.req_pool_indices,
            new=new,
            cached=cached,
            encoder=torch.zeros_like(new) if encoder is None else encoder,
        )

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        if self.raw is None:
            raise RuntimeError("call init_forward_metadata_out_graph first")
        raw = self.raw
        self.full = FullMetadata(
            slots=self.context.req_to_token_pool.req_to_token[raw.rows].long(),
            new=raw.new.clone(),
            cached=raw.cached.clone(),
            encoder=raw.encoder.clone(),
        )

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._forward(call, None, None, batch)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        k, v = call.k, call.v
        if call.save_kv_cache:
            k, v = None, None
        elif k is not None and call.k_rope is not None:
            k, v = torch.cat([k, call.k_rope], dim=-1), k
        return self._forward(call, k, v, batch)

    def _forward(
        self,
        call: AttentionCall,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        q, layer, out = call.q, call.layer, call.out
        metadata = self.full
        if metadata is None:
            raise RuntimeError("call init_forward_metadata first")
        if call.q_rope is not None:
            q = torch.cat([q, call.q_rope], dim=-1)
        if out is None:
            out = q.new_zeros((q.shape[0], q.shape[1], layer.v_head_dim))
        ends = metadata.new.cumsum(0).tolist()
        mask_start = 0
        for request, (new, end) in enumerate(zip(metadata.new.tolist(), ends, strict=True)):
            rows = slice(end - new, end)
            if k is not None and v is not None:
                of_request = rows
                if layer.is_cross_attention:
                    start = int(metadata.encoder[:request].sum())
                    of_request = slice(start, start + int(metadata.encoder[request]))
                first, keys, values = 0, k[of_request], v[of_request]
            else:
                first = self.prefix_len(metadata, request)
                keys, values = self.read(layer, self.key_slots(layer, metadata, request))
            keep = self.visible(layer, batch, request, rows, first, len(keys), mask_start)
            mask_start += new * len(keys)
            if layer.kind == "dual_chunk":
                meets = self.meets(layer, torch.arange(first, first + new), len(keys))
                keys, values, keep = expand_dual_chunk(keys, values, keep, meets.to(keep.device))
            places = torch.arange(first, first + new, device=q.device)
            queries, keys = self.with_bias(q[rows], keys, layer, places)
            result, result_lse = self.attend(queries, keys, values, keep, layer)
            out[rows] = result.to(out.dtype)
            if call.lse is not None:
                call.lse[rows] = result_lse.to(call.lse.dtype)
        return out

    def prefix_len(self, metadata: FullMetadata, request: int) -> int:
        """Tokens before a request's new ones."""
        return int(metadata.cached[request])

    def key_slots(self, layer: LayerSpec, metadata: FullMetadata, request: int) -> torch.Tensor:
        """Slots of the keys that the layer reads, in sequence order."""
        row = metadata.slots[request]
        num_encoder = int(metadata.encoder[request])
        if layer.is_cross_attention:
            return row[:num_encoder]
        num_keys = int(metadata.cached[request] + metadata.new[request])
        return row[num_encoder : num_encoder + num_keys]

    def read(self, layer: LayerSpec, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the slots of the request table, de-quantised."""
        pool = self.context.token_to_kv_pool
        slots = pool.translate(slots, layer.layer_id)
        k_scale, v_scale = pool.read_scales(layer.k_scale, layer.v_scale)
        keys, values = wide_rows(pool, layer.layer_id, slots)
        return keys.double() * k_scale, values.double() * v_scale

    def visible(
        self,
        layer: LayerSpec,
        batch: ForwardBatch,
        request: int,
        rows: slice,
        first: int,
        num_keys: int,
        mask_start: int,
    ) -> torch.Tensor:
        """[T, S] bool: the keys that a request's tokens `rows` see; `first` is their place."""
        num_new = rows.stop - rows.start
        if layer.is_cross_attention:
            return torch.ones((num_new, num_keys), dtype=torch.bool, device=self.context.device)
        positions = torch.arange(first, first + num_new, device=self.context.device)
        custom_mask = None if batch.spec_info is None else batch.spec_info.custom_mask
        if custom_mask is not None:
            custom_mask = custom_mask[mask_start : mask_start + num_new * num_keys]
        positions, key_positions, drafts = tree_positions(batch, request, positions)
        if drafts is not None:
            custom_mask = torch.cat([drafts.new_ones(num_new, num_keys - num_new), drafts], 1)
        if batch.topk_indices is not None:
            custom_mask = topk_mask(batch.topk_indices[rows], num_keys)
        item_starts, shared_prefix = None, 0
        if batch.multi_item is not None:
            item_starts = positions - batch.multi_item.token_pos_in_items[rows]
            shared_prefix = int(batch.multi_item.prefix_lens[request])
        return visibility(
            positions,
            num_keys,
            key_positions=key_positions,
            causal=layer.is_causal,
            window=layer.sliding_window_size,
            chunk=layer.attention_chunk_size,
            custom_mask=custom_mask,
            item_starts=item_starts,
            shared_prefix=shared_prefix,
        )

    def meets(self, layer: LayerSpec, positions: torch.Tensor, num_keys: int) -> torch.Tensor:
        """[T, S]: the query with which each token meets each key, in a "dual_chunk" layer."""
        return chunks_before(positions, num_keys, layer.dual_chunk_len)

    def with_bias(
        self, q: torch.Tensor, k: torch.Tensor, layer: LayerSpec, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Q and K of a request whose product has the layer's bias by distance."""
        if layer.alibi_slopes is not None:
            return self.biased(q, k, layer, positions)
        if layer.relative_bias is not None:
            return self.relative(q, k, layer, positions)
        return q, k

    def biased(
        self, q: torch.Tensor, k: torch.Tensor, layer: LayerSpec, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Q and K with two dims more, whose product is ALiBi's bias.

        Q has (slope, -slope * place) there, before scaling, and K has (place, 1).
        """
        assert layer.alibi_slopes is not None
        slopes = (layer.alibi_slopes.double() / layer.scaling).expand(len(q), -1)
        of_queries = torch.stack([slopes, -slopes * positions.unsqueeze(1)], dim=-1)
        places = torch.arange(len(k), device=k.device).double()
        of_keys = torch.stack([places, torch.ones_like(places)], dim=-1)
        of_keys = of_keys.unsqueeze(1).expand(-1, k.shape[1], -1)
        return torch.cat([q.double(), of_queries], dim=-1), torch.cat([k.double(), of_keys], dim=-1)

    def relative(
        self, q: torch.Tensor, k: torch.Tensor, layer: LayerSpec, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Q and K with more dims, whose product is the relative bias, before scaling.

        A dim for each key: Q has its bias there, and K a one at its own place. If they are fewer, a
        dim for each query and head of a group: K has its bias there, and Q a one.
        """
        assert layer.relative_bias is not None
        reach, (num_q, num_heads, _), (num_k, num_groups, _) = (
            layer.relative_reach,
            q.shape,
            k.shape,
        )
        distances = torch.arange(num_k, device=k.device) - positions.unsqueeze(1)
        columns = distances.clamp(-reach, 0 if layer.is_causal else reach) + reach
        bias = layer.relative_bias.double()[:, columns] / layer.scaling
        group = num_heads // num_groups
        dims = min(num_k, num_q * group)
        ones = torch.eye(dims, dtype=torch.float64, device=k.device)
        if dims == num_k:
            of_queries = bias.transpose(0, 1)
            of_keys = ones.unsqueeze(1).expand(-1, num_groups, -1)
        else:
            of_queries = ones.view(num_q, 1, group, dims).expand(-1, num_groups, -1, -1)
            of_queries = of_queries.reshape(num_q, num_heads, dims)
            of_keys = bias.view(num_groups, group, num_q, num_k).permute(3, 0, 2, 1)
            of_keys = of_keys.reshape(num_k, num_groups, dims)
        return torch.cat([q.double(), of_queries], dim=-1), torch.cat([k.double(), of_keys], dim=-1)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keep: torch.Tensor,
        layer: LayerSpec,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and LSE of one request."""
        return dense_attention(
            q, k, v, keep, scaling=layer.scaling, logit_cap=layer.logit_cap, sinks=layer.sinks
        )
