"""Attention over a KV cache that is interleaved over ranks (decode context parallelism)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    Part,
    PartAttention,
    parts_of,
    quantise,
    shared_kernel,
)
from attnmux.distributed.heads import HeadSplit
from attnmux.distributed.interleaved_keys import KeysOfRanks
from attnmux.distributed.interleaved_kv import InterleavedKVPool, InterleavedTable
from attnmux.distributed.merging import RankMerger, exchange_and_merge

if TYPE_CHECKING:
    from attnmux.core import LayerSpec, UpProjection

CHUNK_BYTES = 1 << 29
"""Memory for the gathered K and V of a chunk of the cached prefixes."""

PREFILLS = (ForwardMode.EXTEND, ForwardMode.MIXED)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Decode:
    """A decode step as this rank's backend sees it."""

    batch: ForwardBatch
    has_keys: torch.Tensor
    """[B, 1] bool: whether this rank holds a key of the request."""


class InterleavedAttnBackend(AttentionBackend):
    """Each rank of a group keeps a part of every request's tokens, and attends to it.

    Decode steps gather the queries of all heads; each rank attends to its own keys, and one
    all-to-all merges the results by LSE. In prompts, each rank attends with its own heads: the new
    tokens to each other, and to chunks of the cached prefixes, which are gathered. MLA prompts come
    by `forward_latent`. Steps with drafts are refused.

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
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """context: with this rank's heads, an `InterleavedKVPool`, and the engine's table.
        decode: a backend of `decode_context`. prompts: backends of `prompt_context`, all alike.

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
        self._heads = heads
        self._pool, self._table = pool, table
        self._interleaving = pool.interleaving
        self.decode = decode
        self._merger: RankMerger | None = shared_kernel("rank_merger", context)
        self._parts = PartAttention[KeysOfRanks | None](
            prompts, unscaled(context.layers, pool.own), pool.own
        )
        layer = context.layers[0]
        row = layer.tp_k_head_num * (layer.qk_head_dim + layer.v_head_dim)
        self._chunk_tokens = max(chunk_bytes // (row * pool.dtype.itemsize), 1)
        self._step: _Decode | None = None
        self._writes: ForwardBatch | None = None
        """The prepared step, with this rank's slots."""
        self._buffers: list[_Buffers] = []

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.decode.get_cuda_graph_seq_len_fill_value()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.decode.init_cuda_graph_state(max_bs, max_num_tokens)
        if not any(each.lens.shape[0] >= max_bs for each in self._buffers):
            self._buffers.append(_Buffers.of(max_bs, self.context.device))

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self._step = self._writes = None
        self._parts.begin(())
        if batch.forward_mode is ForwardMode.IDLE:
            return
        self._table.follow(batch.req_pool_indices)
        if batch.forward_mode.is_decode():
            self._step = self._decode_step(batch)
            self._writes = self._step.batch
            self.decode.init_forward_metadata_out_graph(self._step.batch, in_capture)
            return
        table = self.context.req_to_token_pool
        parts = tuple(parts_of(batch, table, crossing=None, chunk_tokens=self._chunk_tokens))
        if not parts:
            expected = "DECODE, or EXTEND and MIXED of text alone: KV is interleaved over ranks"
            raise InvalidInput("forward_mode", got=batch.forward_mode.name, expected=expected)
        found = (KeysOfRanks.of(part.keys, self._interleaving) for part in parts[1:])
        self._parts.begin(
            Part(batch=part.batch, tokens=part.tokens, keys=keys)
            for part, keys in zip(parts, (None, *found), strict=True)
        )
        self._writes = replace(batch, out_cache_loc=self._interleaving.mine(batch.out_cache_loc))

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        if self._step is not None:
            self.decode.init_forward_metadata_in_graph(self._step.batch)

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
        step = self._step
        if step is None:
            raise _unprepared(batch)
        layer = self.decode.context.layer(call.layer.layer_id)
        q, q_rope = call.q, call.q_rope
        if q_rope is None:
            q = self._heads.gather_queries(q)
        else:
            rows = self._heads.gather_queries(torch.cat((q, q_rope), -1))
            q, q_rope = rows[..., : q.shape[-1]], rows[..., q.shape[-1] :]
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        whole = AttentionCall(q, None, None, layer, q_rope=q_rope, lse=lse)
        out = self.decode.forward_decode(whole, step.batch)
        unseen = -torch.inf if layer.sinks is None else layer.sinks
        lse = torch.where(step.has_keys, lse, unseen)
        if layer.sinks is not None:  # whose weight would otherwise count what was computed
            out = torch.where(step.has_keys.unsqueeze(-1), out, 0)
        out, lse = exchange_and_merge(self._heads.group, out, lse, self._merger)
        if call.lse is not None:
            call.lse.copy_(lse)
        return out

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        layer = call.layer
        k, v = call.k, call.v
        if layer.kind == "mla" or k is None or v is None:
            got = "an MLA prompt" if layer.kind == "mla" else "K and V that are in the pool already"
            expected = "forward_latent for MLA, else K and V with the call: KV is interleaved"
            raise InvalidInput("k", got=got, expected=expected)
        own = self._as_stored(k, layer.k_scale, call.q), self._as_stored(v, layer.v_scale, call.q)

        def read(keys: KeysOfRanks | None) -> tuple[torch.Tensor, torch.Tensor]:
            return own if keys is None else self._gathered(keys, layer, call.q)

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
        own = self._as_stored(torch.cat((latent, k_rope), -1), layer.k_scale, q)

        def read(keys: KeysOfRanks | None) -> tuple[torch.Tensor, torch.Tensor]:
            rows = own if keys is None else self._gathered(keys, layer, q)[0]
            spec, _ = self._parts.layers[layer.layer_id]
            k = q.new_empty((len(rows), spec.tp_k_head_num, spec.qk_head_dim))
            v = q.new_empty((len(rows), spec.tp_v_head_num, spec.v_head_dim))
            projection.expand(rows.squeeze(1), k, v)
            return k, v

        return self._scaled(self._parts.attend(q, read, layer), layer)

    def _decode_step(self, batch: ForwardBatch) -> _Decode:
        held = self._interleaving.lens(batch.seq_lens)
        mine = self._interleaving.mine(batch.out_cache_loc)
        has_keys = (held > 0).unsqueeze(1)
        # No decode step has a request without keys; what it finds then has no weight
        lens = held.clamp(min=1)
        lens_cpu = batch.seq_lens_cpu
        if lens_cpu is not None:
            lens_cpu = self._interleaving.lens(lens_cpu).clamp(min=1)
        room = next((each for each in self._buffers if each.holds(batch)), None)
        if room is not None:
            lens, mine, has_keys = room.copy(lens, mine, has_keys)
        own = replace(
            batch,
            seq_lens=lens,
            seq_lens_cpu=lens_cpu,
            seq_lens_sum=None if lens_cpu is None else int(lens_cpu.sum()),
            out_cache_loc=mine,
        )
        return _Decode(batch=own, has_keys=has_keys)

    def _gathered(
        self, keys: KeysOfRanks, layer: LayerSpec, q: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return keys.gather(self._pool.own, layer, self._heads, q.dtype)

    def _as_stored(self, rows: torch.Tensor, scale: float | None, q: torch.Tensor) -> torch.Tensor:
        """K or V as the pool stores them, which may have rounded them."""
        return quantise(rows, self._pool.dtype, scale).to(q.dtype)

    def _scaled(self, out: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
        """The result over V without the pool's scale, with it. That of K is in `unscaled`."""
        _, scale = self._pool.own.read_scales(layer.k_scale, layer.v_scale)
        return out if scale == 1 else (out.float() * scale).to(out.dtype)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Buffers:
    """Where captured decode steps find what is made for each step."""

    lens: torch.Tensor
    slots: torch.Tensor
    has_keys: torch.Tensor

    @classmethod
    def of(cls, size: int, device: torch.device) -> _Buffers:
        return cls(
            lens=torch.ones(size, dtype=torch.int32, device=device),
            slots=torch.zeros(size, dtype=torch.int64, device=device),
            has_keys=torch.ones(size, 1, dtype=torch.bool, device=device),
        )

    def holds(self, batch: ForwardBatch) -> bool:
        return batch.batch_size <= self.lens.shape[0]

    def copy(
        self, lens: torch.Tensor, slots: torch.Tensor, has_keys: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The values, in the buffers."""
        rows = lens.shape[0]
        pairs = ((self.lens, lens), (self.slots, slots), (self.has_keys, has_keys))
        for buffer, values in pairs:
            buffer[:rows].copy_(values)
        return self.lens[:rows], self.slots[:rows], self.has_keys[:rows]


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


def _unprepared(batch: ForwardBatch) -> InvalidInput:
    expected = "a step that init_forward_metadata prepared"
    return InvalidInput("batch", got=batch.forward_mode.name, expected=expected)
