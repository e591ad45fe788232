"""The arguments of kernels over paged KV: a step's page tables, its lengths, and where each
request's queries begin."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from attnmux.core.adapters.indices.keys import page_table
from attnmux.core.adapters.indices.ragged import cu_seqlens, uniform_indptr
from attnmux.core.adapters.indices.segments import store
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.facts.errors import InvalidInput

Tables = dict[tuple[bool, int], torch.Tensor]
"""Page tables before translation, by (is the encoder's, page size)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyGroup:
    """Layers whose keys are in the same places, so that they share a page table.

    Windows make no difference: the kernels skip the keys that a window hides.
    """

    is_cross: bool
    page_size: int
    """Page size of the table. With an encoder, the decoder's keys may begin in mid-page: then the
    table names slots, and the pool is viewed in pages of one token."""
    pool_group: int
    """The result of `KVPool.group_of`."""
    layer_id: int = field(compare=False)
    """One of the layers."""

    @classmethod
    def of(cls, layer: LayerSpec, context: BackendContext) -> KeyGroup:
        has_encoder = any(other.is_cross_attention for other in context.layers)
        pool = context.token_to_kv_pool
        return cls(
            is_cross=layer.is_cross_attention,
            page_size=1 if has_encoder and not layer.is_cross_attention else pool.page_size,
            pool_group=pool.group_of(layer.layer_id),
            layer_id=layer.layer_id,
        )

    def translated(self, table: torch.Tensor, context: BackendContext) -> torch.Tensor:
        """The pages of these layers' buffers for a table of the request table's pages."""
        pool = context.token_to_kv_pool
        if self.page_size == pool.page_size:
            return pool.translate_pages(table, self.layer_id)
        return pool.translate(table, self.layer_id)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Keys:
    """Where the keys of each request are."""

    page_table: torch.Tensor
    """[at least B, width] int32."""
    lens: torch.Tensor
    """[at least B] int32."""

    @classmethod
    def zeros(cls, rows: int, columns: int, device: torch.device) -> Keys:
        """Buffers for keys of up to as many rows."""
        table = torch.zeros((rows, columns), dtype=torch.int32, device=device)
        lens = torch.zeros(rows, dtype=torch.int32, device=device)
        return cls(page_table=table, lens=lens)

    def with_lens(self, lens: torch.Tensor) -> Keys:
        """These keys with other lengths [B]."""
        return Keys(page_table=self.page_table, lens=lens)

    def copied_to(self, buffers: Keys) -> Keys:
        """These keys at the front of larger buffers, where graphs read them."""
        rows, columns = self.page_table.shape
        return Keys(
            page_table=buffers.page_table[:rows, :columns].copy_(self.page_table),
            lens=buffers.lens[: len(self.lens)].copy_(self.lens),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PageTables:
    """The tables and lengths of a step. `fill` builds those that live on the device."""

    batch_size: int
    queries_each: int | None
    """New tokens of each request if all have as many: in decode and verify."""
    max_seqlen_q: int
    max_seqlen_k: int
    is_tree: bool
    """Whether a mask says which drafts each draft sees. Then the keys are those of the prefix."""
    has_all_keys: bool
    """Whether the host knows that no request has a prefix, so that a layer's call brings all keys.
    False if results must not depend on the batch: the kernels sum keys of the call and of the
    pool in different orders."""
    fixed: dict[KeyGroup, Keys]
    """Buffers that a graph replays with; empty for an eager step."""
    key_tile: int = 1
    """Rows of a table have room for a multiple of so many keys."""
    keys: dict[KeyGroup, Keys] = field(default_factory=dict)
    """Rows [B] of the tables and lengths."""
    bounds: dict[str, torch.Tensor] = field(default_factory=dict)
    """[B + 1] int32: see `query_bounds` and `encoder_bounds`."""

    @classmethod
    def of(
        cls,
        batch: ForwardBatch,
        context: BackendContext,
        fixed: dict[KeyGroup, Keys],
        *,
        trees: bool = False,
        key_tile: int = 1,
    ) -> PageTables:
        """The step's shape, from what the host knows.

        Lengths count as the longest possible if the host has no mirrors, in graphs, and if
        results must not depend on the batch: the kernels choose tiles by the longest request.

        trees: whether the caller serves the mask of a draft tree itself.
        key_tile: keys that the kernels look up at once, which may end after a row's last page.
        Raises InvalidInput for other custom masks and for many items, which no kernel serves.
        """
        is_verify = batch.forward_mode.is_target_verify()
        is_tree = trees and is_verify and batch.tree_mask is not None
        (batch.check_no_items if is_tree else batch.check_unmasked)()
        longest = context.max_context_len
        known = not context.request.deterministic and not fixed
        queries_each = batch.queries_each()
        max_seqlen_k = longest
        if known and batch.seq_lens_cpu is not None:
            max_seqlen_k = _largest(batch.seq_lens_cpu)
        if is_verify and not is_tree:
            max_seqlen_k = min(max_seqlen_k + (queries_each or 0), longest)
        if queries_each is not None:
            max_seqlen_q = queries_each
        elif not known:
            max_seqlen_q = longest
        elif batch.extend_seq_lens_cpu is not None:
            max_seqlen_q = _largest(batch.extend_seq_lens_cpu)
        else:
            max_seqlen_q = min(batch.num_tokens, longest)
        prefix_lens = batch.extend_prefix_lens_cpu
        has_no_prefix = prefix_lens is not None and _largest(prefix_lens) == 0
        return cls(
            batch_size=batch.batch_size,
            queries_each=queries_each,
            max_seqlen_q=max(max_seqlen_q, 1),
            max_seqlen_k=max(max_seqlen_k, 1),
            is_tree=is_tree,
            has_all_keys=known and not is_tree and has_no_prefix,
            fixed=fixed,
            key_tile=key_tile,
        )

    @staticmethod
    def buffers(
        groups: tuple[KeyGroup, ...], max_bs: int, context: BackendContext, *, key_tile: int = 1
    ) -> dict[KeyGroup, Keys]:
        """Tables of zeros for graphs of up to `max_bs` requests. key_tile: as in `of`."""
        longest, device = _rounded_up(context.max_context_len, key_tile), context.device
        return {
            group: Keys.zeros(max_bs, -(-longest // group.page_size), device) for group in groups
        }

    def fill(
        self, batch: ForwardBatch, groups: tuple[KeyGroup, ...], context: BackendContext
    ) -> None:
        """Build the tensors that layers read, with device operations of static shape."""
        # Tensors of a warm-up are not part of the capture that follows it.
        self.bounds.clear()
        tables: Tables = {}
        for group in groups:
            self.keys[group] = self._keys(batch, group, context, tables)
        if self.queries_each is None and batch.extend_seq_lens is not None:
            self.bounds["queries"] = cu_seqlens(batch.extend_seq_lens)

    def query_bounds(self, device: torch.device) -> torch.Tensor:
        """[B + 1] int32: where each request's queries begin."""
        if "queries" not in self.bounds:
            self.bounds["queries"] = uniform_indptr(
                self.batch_size, self.queries_each or 1, device=device
            )
        return self.bounds["queries"]

    def unowned_rows(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, 1, 1] bool: tokens after those of all requests, which no kernel writes."""
        bounds = self.query_bounds(batch.out_cache_loc.device)
        rows = torch.arange(batch.num_tokens, device=bounds.device)
        return (rows >= bounds[-1]).view(-1, 1, 1)

    def encoder_bounds(self, batch: ForwardBatch) -> torch.Tensor:
        """[B + 1] int32: where each request's encoder tokens begin in the call's K and V."""
        if "encoder" not in self.bounds:
            self.bounds["encoder"] = cu_seqlens(_encoder_lens(batch))
        return self.bounds["encoder"]

    def _keys(
        self, batch: ForwardBatch, group: KeyGroup, context: BackendContext, tables: Tables
    ) -> Keys:
        buffers = self.fixed.get(group)
        lens = self._key_lens(batch, group, None if buffers is None else buffers.lens)
        table = tables.get((group.is_cross, group.page_size))
        if table is None:
            longest = context.max_context_len if group.is_cross else self.max_seqlen_k
            table = tables[group.is_cross, group.page_size] = page_table(
                context.req_to_token_pool,
                batch.req_pool_indices,
                lens,
                page_size=group.page_size,
                kv_start=None if group.is_cross else batch.encoder_lens,
                max_len=_rounded_up(longest, self.key_tile),
            )
        table = group.translated(table, context)
        if buffers is not None:
            table = buffers.page_table[: self.batch_size].copy_(table)
        return Keys(page_table=table, lens=lens)

    def _key_lens(
        self, batch: ForwardBatch, group: KeyGroup, out: torch.Tensor | None
    ) -> torch.Tensor:
        if group.is_cross:
            return _encoder_lens(batch)
        is_chain = batch.forward_mode.is_target_verify() and not self.is_tree
        if is_chain and self.queries_each is not None:
            return store(batch.seq_lens + self.queries_each, out, torch.int32)
        return batch.seq_lens


def _encoder_lens(batch: ForwardBatch) -> torch.Tensor:
    if batch.encoder_lens is None:
        raise InvalidInput("encoder_lens", got=None, expected="lengths for cross attention")
    return batch.encoder_lens


def _largest(lens: torch.Tensor) -> int:
    return int(lens.max()) if lens.numel() else 0


def _rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
