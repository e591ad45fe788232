"""Long prompts that several ranks compute together: K and V travel while attention runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from attnmux.core import (
    AttentionBackend,
    DispatchingBackend,
    ForwardBatch,
    GraphUnsupported,
    InvalidInput,
    UpProjection,
)
from attnmux.distributed.errors import RanksDiffer
from attnmux.distributed.kv_rows import KVRows, Stored, check_new
from attnmux.distributed.ranks import RankGroup
from attnmux.distributed.split_parts import ChunkRows, SplitKeys, parts_of
from attnmux.distributed.zigzag import SPLIT_MODES, ZigzagStep
from attnmux.parts import PartAttention

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, ForwardMode, LayerSpec
from itertools import accumulate, pairwise

from attnmux.distributed.ranks import Pending


class ChunkGather:
    """The rows of a step's tokens, chunk by chunk as in `ZigzagStep.order`.

    Chunks travel from the rank that has them to all others in rounds, in the order of the sequence,
    since a chunk is needed by later ones alone. All rounds start at once and run one after another
    while the caller does other work.
    """

    def __init__(
        self,
        group: RankGroup,
        step: ZigzagStep,
        own: torch.Tensor,
        rows: torch.Tensor,
        *,
        chunks_at_once: int,
    ) -> None:
        """own: [T of this rank, width], rows of its tokens in their order. rows: [T, width], memory
        for all. chunks_at_once: chunks of a round.

        Raises RankFailed as a collective does.
        """
        self._rows = rows
        self._chunks_at_once = chunks_at_once
        ends = [0, *accumulate(map(sum, step.chunk_lens))]
        chunks = [rows[start:end] for start, end in pairwise(ends)]
        first, second = step.own_chunks
        middle = len(chunks[first])
        chunks[first].copy_(own[:middle])
        chunks[second].copy_(own[middle:])
        # As bytes, since NCCL does not know all integers of torch
        moves = [(chunk.view(torch.uint8), step.owner(n)) for n, chunk in enumerate(chunks)]
        self._rounds: list[Pending] = []
        for start in range(0, len(moves), chunks_at_once):
            some = [move for move in moves[start : start + chunks_at_once] if len(move[0])]
            values, owners = [chunk for chunk, _ in some], [owner for _, owner in some]
            self._rounds.append(group.start_broadcasts(values, owners))
        self._waited = 0

    def wait(self, chunks: int | None = None) -> torch.Tensor:
        """[T, width]; the first `chunks` have arrived; None: all of them.

        Raises RankFailed if they do not arrive.
        """
        last = None if chunks is None else -(-chunks // self._chunks_at_once)
        for pending in self._rounds[self._waited : last]:
            self._waited += 1
            pending.wait()
        return self._rows


CHUNK_BYTES = 1 << 29
"""Memory for K and V of a part that are copied or expanded, as in `ChunkedPrefixBackend`."""


class PrefillParallelBackend(DispatchingBackend):
    """Runs a `ZigzagStep` together with the other ranks, and any other step by `inner`.

    In each layer of a split step a rank has Q, K and V of its own tokens. It starts to send its K
    and V to the others, attends causally to its own chunks and without a mask to the cached prefix,
    and then to the chunks of others as they arrive. Each result is merged by its LSE, in float32.
    In the end its pool holds K and V of the whole step, or those with a slot.

    `inner` runs layers whose parts cannot be merged (windows, attention chunks, dual chunk), and
    absorbed MLA, after K and V of all ranks are in the pool. Their communication is not hidden.
    `forward_latent` runs MLA with expanded heads, part by part.

    Each request's cached prefix is in the pool of every rank, so that steps of other kinds, such as
    decode, need no other rank.
    """

    def __init__(
        self,
        *,
        inner: AttentionBackend,
        parts: Sequence[AttentionBackend],
        group: RankGroup,
        overlap: bool = True,
        chunks_at_once: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """parts: one or more backends of `split_context(inner.context)`, all alike; see
        `PartAttention`. Ranks may have different ones. overlap: False waits for all chunks before
        attention begins, for comparison. chunks_at_once: chunks that travel in one round and are
        read in one call, the same on all ranks; None: as many as there are ranks, so that each of
        them sends one in each of two rounds. chunk_bytes: memory for K and V of a part.

        Raises InvalidInput for backends of another context, for sizes below 1, and for a pool of
        4-bit floats.
        """
        super().__init__(inner.context, (inner,))
        self.chunks_at_once = group.size if chunks_at_once is None else chunks_at_once
        InvalidInput.check_at_least(1, "chunks_at_once", self.chunks_at_once)
        InvalidInput.check_at_least(1, "chunk_bytes", chunk_bytes)
        layers = [layer for layer in inner.context.layers if layer.is_mergeable]
        pool = inner.context.token_to_kv_pool
        pool.check_whole_bytes("prompts that ranks split")
        self._parts = PartAttention[SplitKeys](parts, layers, pool)
        self.inner = inner
        self.group = group
        self.overlap = overlap
        row = max(
            own.tp_k_head_num * (own.qk_head_dim + own.v_head_dim)
            for own, _ in self._parts.layers.values()
        )
        itemsize = 2 if self._dtype is None else self._dtype.itemsize
        self._part_tokens = max(chunk_bytes // (row * itemsize), 1)
        self._step: ZigzagStep | None = None
        self._is_inner_prepared = False

    def serving(self, batch: ForwardBatch) -> AttentionBackend:
        """`inner`, for everything but the attention of a split step."""
        return self.inner

    def select(self, mode: ForwardMode) -> AttentionBackend:
        """Itself for modes that may be split, else a child of `inner`."""
        return self if mode in SPLIT_MODES else self.inner.select(mode)

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Raises InvalidInput for a malformed step and for one of another group of ranks; under
        `context.debug` also RanksDiffer if ranks split different steps."""
        if not isinstance(batch, ZigzagStep):
            super().init_forward_metadata(batch)
            return
        AttentionBackend.init_forward_metadata(self, batch)
        if self.context.debug:
            self._check_ranks(batch)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        if not isinstance(batch, ZigzagStep):
            super().init_forward_metadata_out_graph(batch, in_capture)
            return
        if in_capture:
            raise GraphUnsupported("a step that is split over ranks cannot be captured")
        self._check_step(batch)
        self._parts.begin(
            parts_of(
                batch,
                self.context.req_to_token_pool,
                chunks_at_once=self.chunks_at_once,
                most_tokens=self._part_tokens,
            )
        )
        self._is_inner_prepared = False
        self._step = batch

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        if not isinstance(batch, ZigzagStep):
            super().init_forward_metadata_in_graph(batch)

    def save_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: LayerSpec,
        batch: ForwardBatch,
        *,
        k_rope: torch.Tensor | None = None,
    ) -> None:
        """Write K and V of the rank's own tokens; attention writes those of the others."""
        if isinstance(batch, ZigzagStep) and not self._is_in_parts(layer, absorbed=k_rope):
            self._check_pool_step(layer, batch)
        super().save_kv(k, v, layer, batch, k_rope=k_rope)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        if not isinstance(batch, ZigzagStep):
            return super().forward_extend(call, batch)
        self._check_prepared(batch)
        layer = call.layer
        kv = KVRows(pool=self.context.token_to_kv_pool, layer=layer)
        stored = kv.of(*check_new(call.k, call.v if call.k_rope is None else call.k_rope))
        if not self._is_in_parts(layer, absorbed=call.k_rope):
            return self._over_pool(call, batch, kv, stored)
        expand = partial(kv.values, dtype=call.q.dtype)
        saves = call.save_kv_cache
        return self._over_parts(call.q, kv, stored, batch, expand, saves=saves, lse=call.lse)

    def forward_latent(
        self,
        q: torch.Tensor,
        latent: torch.Tensor,
        k_rope: torch.Tensor,
        layer: LayerSpec,
        batch: ForwardBatch,
        projection: UpProjection,
    ) -> torch.Tensor:
        if not isinstance(batch, ZigzagStep):
            return super().forward_latent(q, latent, k_rope, layer, batch, projection)
        self._check_prepared(batch)
        self.inner.save_kv(latent, None, layer, batch, k_rope=k_rope)
        kv = KVRows(pool=self.context.token_to_kv_pool, layer=layer)
        expand = partial(_expanded, kv, projection, q.dtype)
        return self._over_parts(q, kv, kv.of(latent, k_rope), batch, expand)

    def _over_parts(
        self,
        q: torch.Tensor,
        kv: KVRows,
        own: torch.Tensor,
        step: ZigzagStep,
        expand: Callable[[Stored], Stored],
        *,
        saves: bool = True,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention [T, H, Dv] of one layer. own: rows of the tokens' K and V. expand: K and V as a
        call takes them, of values as a pool stores them. saves: whether K and V go to the pool, and
        tokens see the prefix there."""
        gather = self._gather(own, kv, step)

        def read(keys: SplitKeys) -> Stored | None:
            if keys is None:
                return expand(kv.split(own))
            if isinstance(keys, ChunkRows):
                return expand(kv.split(gather.wait(keys.chunks)[keys.rows]))
            return expand(kv.read(keys)) if saves else None

        out = self._parts.attend(q, read, kv.layer, lse)
        rows = gather.wait()
        if saves:
            kv.write(rows, step.whole_cache_loc)
        return out

    def _over_pool(
        self, call: AttentionCall, step: ZigzagStep, kv: KVRows, own: torch.Tensor
    ) -> torch.Tensor:
        """Attention by `inner` once K and V of all ranks are in the pool."""
        if not call.save_kv_cache:
            expected = f"True: layer {call.layer.layer_id} reads K and V of other ranks in the pool"
            raise InvalidInput("save_kv_cache", got=False, expected=expected)
        kv.write(self._gather(own, kv, step).wait(), step.whole_cache_loc)
        if not step.num_tokens:
            return call.empty_result()
        if not self._is_inner_prepared:
            self.inner.init_forward_metadata(step)
            self._is_inner_prepared = True
        return self.inner.forward_extend(call, step)

    def _gather(self, own: torch.Tensor, kv: KVRows, step: ZigzagStep) -> ChunkGather:
        shape = len(step.order), kv.width
        rows = self.context.workspace.tensor("prefill_parallel.rows", shape, kv.dtype)
        gather = ChunkGather(self.group, step, own, rows, chunks_at_once=self.chunks_at_once)
        if not self.overlap:
            gather.wait()
        return gather

    def _is_in_parts(self, layer: LayerSpec, *, absorbed: torch.Tensor | None) -> bool:
        """Whether a call of `forward` runs part by part. absorbed: its rotary keys, of MLA."""
        return absorbed is None and layer.layer_id in self._parts.layers

    def _check_pool_step(self, layer: LayerSpec, step: ZigzagStep) -> None:
        """Refuse a layer that `inner` had to run in too large a step."""
        name = f"layer {layer.layer_id}"
        most = self.context.max_batch_size
        if step.batch_size > most:
            got = f"{step.num_requests} requests with 2 pieces each"
            expected = f"at most {most} pieces, the context's max_batch_size, for {name}"
            raise InvalidInput("batch_size", got=got, expected=expected)

    def _check_step(self, step: ZigzagStep) -> None:
        if (step.rank, step.size) != (self.group.rank, self.group.size):
            got = f"the part of rank {step.rank} of {step.size}"
            expected = f"that of rank {self.group.rank} of {self.group.size}, as in the group"
            raise InvalidInput("batch", got=got, expected=expected)

    def _check_prepared(self, step: ZigzagStep) -> None:
        if self._step is None or self._step.order is not step.order:
            expected = "the step that init_forward_metadata prepared last"
            raise InvalidInput("batch", got="another split step", expected=expected)

    def _check_ranks(self, step: ZigzagStep) -> None:
        rounds = f"{self.chunks_at_once} at once"
        steps = self.group.exchange(f"{step.chunk_lens} on {step.cached_lens}, {rounds}")
        if len(set(steps)) > 1:
            hint = "give zigzag_step the same step on every rank"
            raise RanksDiffer("lengths of chunks", by_rank=steps, hint=hint)


def _expanded(kv: KVRows, projection: UpProjection, dtype: torch.dtype, stored: Stored) -> Stored:
    """K [n, H, nope + rope] and V [n, H, v] of latent rows."""
    (rows,) = kv.values(stored, dtype)
    return projection.expand_rows(rows.squeeze(1))
