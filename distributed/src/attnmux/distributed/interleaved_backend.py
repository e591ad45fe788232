"""Attention over a KV cache that is interleaved over ranks (decode context parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    KVPool,
)
from attnmux.core.plugin import shared_kernel
from attnmux.distributed.heads import HeadSplit
from attnmux.distributed.interleaved_kv import InterleavedKVPool, InterleavedTable
from attnmux.distributed.interleaved_step import RankStep, StepBuffers
from attnmux.distributed.merging import RankMerger, exchange_and_merge
from attnmux.parts import KeyPart, PartAttention, SeenPrefixes, among_drafts

if TYPE_CHECKING:
    from attnmux.core import LayerSpec, UpProjection
from dataclasses import dataclass

from attnmux.core import LayerSpec
from attnmux.distributed.interleaving import Interleaving


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeysOfRanks:
    """Where the keys of one part of a step lie."""

    slots: torch.Tensor
    """[most] int64: this rank's, padded with 0 to the most that a rank holds."""
    order: torch.Tensor
    """[n] int64: the row of each key among the gathered rows, [size * most]."""

    @classmethod
    def of(cls, slots: torch.Tensor, interleaving: Interleaving) -> KeysOfRanks:
        """slots: [n] int64, the engine's. It waits for the device, to count each rank's keys."""
        owners = interleaving.owners(slots)
        is_of = owners == torch.arange(interleaving.size, device=slots.device).unsqueeze(1)
        counts = is_of.sum(1)
        most = int(counts.max())
        local = interleaving.local(slots[is_of[interleaving.rank]])
        within = is_of.cumsum(1).gather(0, owners.unsqueeze(0)).squeeze(0) - 1
        return cls(
            slots=torch.nn.functional.pad(local, (0, most - local.shape[0])),
            order=owners * most + within,
        )

    def gather(
        self, pool: KVPool, layer: LayerSpec, heads: HeadSplit, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K [n, Hkv, D] and V [n, Hkv, Dv] of this rank's heads, as the pool stores them, in
        `dtype`. In MLA, K is the latent row and V its first part. Every rank calls it."""
        k_buffer, v_buffer = pool.get_kv_buffer(layer.layer_id)
        read = pool.translate(self.slots, layer.layer_id)
        if layer.kind == "mla":
            rows = self._rows(k_buffer, read, heads).to(dtype)
            return rows, rows[..., : layer.v_head_dim]
        k, v = (self._rows(buffer, read, heads).to(dtype) for buffer in (k_buffer, v_buffer))
        return k, v

    def _rows(self, buffer: torch.Tensor, read: torch.Tensor, heads: HeadSplit) -> torch.Tensor:
        # As bytes: neither torch's indexing nor every transport knows 8-bit floats
        raw = buffer.view(torch.uint8) if buffer.itemsize == 1 else buffer
        gathered = heads.swap_rows(raw.index_select(0, read))
        return gathered.flatten(0, 1).index_select(0, self.order).view(buffer.dtype)


CHUNK_BYTES = 1 << 29
"""Memory for the gathered K and V of a chunk of the cached prefixes."""

PREFILLS = (ForwardMode.EXTEND, ForwardMode.MIXED)


class InterleavedAttnBackend(AttentionBackend):
    """Each rank of a group keeps a part of every request's tokens, and attends to it.

    Decode steps gather the queries of all heads; each rank attends to its own keys, and one
    all-to-all merges the results by LSE. In prompts, each rank attends with its own heads: the new
    tokens to each other, and to chunks of the cached prefixes, which are gathered. MLA prompts come
    by `forward_latent`. A step that verifies chains of drafts is a decode step over the prefixes,
    with the query heads of all drafts; each rank's heads of the drafts attend to each other in
    plain torch, and both are merged by LSE.

    Every rank runs the same steps with the same batches. Ranks without a key of a request add
    nothing to it.
    """

    def __init__(
        self,
        context: BackendContext,
        *,
        heads: HeadSplit,
        decode: AttentionBackend,
        prompts: Sequence[AttentionBackend],
        prefixes: AttentionBackend | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """context: with this rank's heads, an `InterleavedKVPool`, and the engine's table.
        decode: a backend of `decode_context`. prompts: backends of `prompt_context`, all alike.
        prefixes: a backend of `draft_context` of decode's context; None refuses drafts.

        Raises InvalidInput for backends of other contexts.
        """
        super().__init__(context)
        pool, table = context.token_to_kv_pool, decode.context.req_to_token_pool
        if not isinstance(pool, InterleavedKVPool) or not isinstance(table, InterleavedTable):
            expected = "an InterleavedKVPool, and a decode backend of decode_context"
            raise InvalidInput("context", got=type(pool).__name__, expected=expected)
        if decode.context.token_to_kv_pool is not pool.own:
            expected = "decode_context of this context"
            raise InvalidInput("decode", got="a backend of another context", expected=expected)
        if prefixes is not None and prefixes.context.req_to_token_pool is not table:
            expected = "draft_context of decode's context"
            raise InvalidInput("prefixes", got="a backend of another context", expected=expected)
        self._heads = heads
        self._pool, self._table = pool, table
        self._interleaving = pool.interleaving
        self.decode = decode
        self.prefixes = prefixes
        self._merger: RankMerger | None = shared_kernel("rank_merger", context)
        self._parts = PartAttention[KeysOfRanks | None](
            prompts, unscaled(context.layers, pool.own), pool.own
        )
        layer = context.layers[0]
        row = layer.tp_k_head_num * (layer.qk_head_dim + layer.v_head_dim)
        self._chunk_tokens = max(chunk_bytes // (row * pool.dtype.itemsize), 1)
        self._step: RankStep | None = None
        self._writes: ForwardBatch | None = None
        """The prepared step, with this rank's slots."""
        self._buffers: list[StepBuffers] = []

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.decode.get_cuda_graph_seq_len_fill_value()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.decode.init_cuda_graph_state(max_bs, max_bs)
        if self.prefixes is not None:
            self.prefixes.init_cuda_graph_state(max_bs, max_bs)
        if not any(buffer.has_room(max_bs, max_num_tokens) for buffer in self._buffers):
            self._buffers.append(StepBuffers.of(max_bs, max_num_tokens, self.context.device))

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self._step = self._writes = None
        self._parts.begin(())
        if batch.forward_mode is ForwardMode.IDLE:
            return
        self._table.follow(batch.req_pool_indices)
        verifies = batch.forward_mode.is_target_verify() and self.prefixes is not None
        if batch.forward_mode.is_decode() or verifies:
            step = RankStep.of(batch, self._interleaving, self._buffers)
            self._step, self._writes = step, step.writes
            self._serving(step).init_forward_metadata_out_graph(step.batch, in_capture)
            return
        table = self.context.req_to_token_pool
        parts = tuple(
            KeyPart.of_step(
                batch, table, page_size=1, crossing=None, chunk_tokens=self._chunk_tokens
            )
        )
        if not parts:
            expected = (
                "DECODE, EXTEND and MIXED of text only, or TARGET_VERIFY of the chains that were "
                "decided for: KV is interleaved over ranks"
            )
            raise InvalidInput("forward_mode", got=batch.forward_mode.name, expected=expected)
        keys_of_parts = (KeysOfRanks.of(part.keys, self._interleaving) for part in parts[1:])
        self._parts.begin(
            KeyPart(batch=part.batch, tokens=part.tokens, keys=keys)
            for part, keys in zip(parts, (None, *keys_of_parts), strict=True)
        )
        self._writes = replace(batch, out_cache_loc=self._interleaving.mine(batch.out_cache_loc))

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        if self._step is not None:
            self._serving(self._step).init_forward_metadata_in_graph(self._step.batch)

    def save_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        k_rope: torch.Tensor | None = None,
    ) -> None:
        """Write the new tokens' K and V to the rank that owns each slot."""
        if self._writes is None:
            raise _unprepared(batch)
        whole = self.decode.context.layer(layer.layer_id)
        if k_rope is None and v is not None:
            k, v = self._heads.gather_keys(k), self._heads.gather_keys(v)
        self.decode.save_kv(k, v, whole, self._writes, k_rope=k_rope)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if self._step is None or self._step.drafts:
            raise _unprepared(batch)
        out, lse = self._among_ranks(call, self._step)
        if call.lse is not None:
            call.lse.copy_(lse)
        return out

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if batch.forward_mode.is_target_verify():
            return self._verified(call, batch)
        layer = call.layer
        k, v = call.k, call.v
        if layer.kind == "mla" or k is None or v is None:
            got = "an MLA prompt" if layer.kind == "mla" else "K and V that are in the pool already"
            expected = "forward_latent for MLA, else K and V with the call: KV is interleaved"
            raise InvalidInput("k", got=got, expected=expected)
        local = (
            self._stored(k, layer.k_scale).to(call.q.dtype),
            self._stored(v, layer.v_scale).to(call.q.dtype),
        )

        def read(keys: KeysOfRanks | None) -> tuple[torch.Tensor, torch.Tensor]:
            return local if keys is None else self._gathered(keys, layer, call.q)

        out = self._parts.attend(call.q, read, layer, call.lse)
        return self._scaled(out, layer)

    def forward_latent(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        projection: UpProjection,
    ) -> torch.Tensor:
        if batch.forward_mode not in PREFILLS:
            return super().forward_latent(q, latent, k_rope, layer, batch, projection)
        self.save_kv(latent, None, layer, batch, k_rope=k_rope)
        latents = self._stored(torch.cat((latent, k_rope), -1), layer.k_scale).to(q.dtype)

        def read(keys: KeysOfRanks | None) -> tuple[torch.Tensor, torch.Tensor]:
            rows = latents if keys is None else self._gathered(keys, layer, q)[0]
            return projection.expand_rows(rows.squeeze(1))

        return self._scaled(self._parts.attend(q, read, layer), layer)

    def _serving(self, step: RankStep) -> AttentionBackend:
        """The backend that attends to this rank's keys."""
        return self.prefixes if step.drafts and self.prefixes is not None else self.decode

    def _among_ranks(
        self, call: AttentionCall, step: RankStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of this rank's heads to the keys of all ranks, [T, Hq, Dv] in the dtype of Q,
        and its LSE [T, Hq]; for drafts, to those of the prefixes."""
        backend = self._serving(step)
        layer = backend.context.layer(call.layer.layer_id)
        q = call.q if call.q_rope is None else torch.cat((call.q, call.q_rope), -1)
        q = self._heads.gather_queries(q)
        width, groups = step.drafts, layer.tp_k_head_num
        most = layer.tp_q_head_num // q.shape[1]
        if width:
            q = SeenPrefixes.as_heads(q, groups, width, most)
        q, q_rope = _parts(q, call)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        whole = AttentionCall(q, None, None, layer, q_rope=q_rope, lse=lse)
        out = backend.forward_decode(whole, step.batch)
        unseen = -torch.inf if layer.sinks is None else layer.sinks
        lse = torch.where(step.has_keys, lse, unseen)
        if layer.sinks is not None:  # whose weight would otherwise count what was computed
            out = torch.where(step.has_keys.unsqueeze(-1), out, 0)
        if width:
            out, lse = (
                SeenPrefixes.as_tokens(tensor, groups, width, most) for tensor in (out, lse)
            )
        return exchange_and_merge(self._heads.group, out, lse, self._merger)

    def _verified(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        """Attention of the drafts to their prefixes and to each other."""
        layer, step = call.layer, self._step
        if step is None or not step.drafts:
            raise _unprepared(batch)
        if call.k is None or (call.v is None and call.k_rope is None):
            expected = "K and V of the drafts with the call: KV is interleaved over ranks"
            raise InvalidInput("k", got=None, expected=expected)
        seen, seen_lse = self._among_ranks(call, step)
        k_scale, v_scale = self._pool.own.read_scales(layer.k_scale, layer.v_scale)
        q = call.q if call.q_rope is None else torch.cat((call.q, call.q_rope), -1)
        k = call.k if call.k_rope is None else torch.cat((call.k, call.k_rope), -1)
        k = self._stored(k, layer.k_scale).float() * k_scale
        v = k[..., : layer.v_head_dim]
        if call.v is not None:
            v = self._stored(call.v, layer.v_scale).float() * v_scale
        causal = torch.ones(step.drafts, step.drafts, dtype=torch.bool, device=q.device).tril()
        visible = causal.expand(batch.batch_size, -1, -1)
        return among_drafts(q, k, v, layer, visible, seen, seen_lse, lse=call.lse)

    def _gathered(
        self, keys: KeysOfRanks, layer: LayerSpec, q: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return keys.gather(self._pool.own, layer, self._heads, q.dtype)

    def _stored(self, rows: torch.Tensor, scale: float | None) -> torch.Tensor:
        """K or V as the pool stores them, which may have rounded them."""
        return KVPool.quantise(rows, self._pool.dtype, scale)

    def _scaled(self, out: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
        """The result over V without the pool's scale, with it. That of K is in `unscaled`."""
        _, scale = self._pool.own.read_scales(layer.k_scale, layer.v_scale)
        return out if scale == 1 else (out.float() * scale).to(out.dtype)


def unscaled(layers: Sequence[LayerSpec], pool: KVPool) -> tuple[LayerSpec, ...]:
    """The layers for K and V as the pool stores them: its scale of K multiplies the logits."""
    return tuple(
        replace(
            layer,
            scaling=layer.scaling * pool.read_scales(layer.k_scale, layer.v_scale)[0],
            k_scale=None,
            v_scale=None,
        )
        for layer in layers
    )


def _parts(rows: torch.Tensor, call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`q` and `q_rope` of rows that hold both, as those of the call were."""
    if call.q_rope is None:
        return rows, None
    width = call.q.shape[-1]
    return rows[..., :width], rows[..., width:]


def _unprepared(batch: ForwardBatch) -> InvalidInput:
    expected = "a step that init_forward_metadata prepared"
    return InvalidInput("batch", got=batch.forward_mode.name, expected=expected)
