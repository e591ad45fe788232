"""One step's lengths, and its keys as flashinfer wants them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from attnmux.core.batch import ForwardBatch
from attnmux.core.context import BackendContext
from attnmux.core.errors import InvalidInput
from attnmux.core.indices import cu_seqlens, kv_indices, kv_indptr, kv_last_page_len, window_view
from attnmux.core.kv import KVPool
from attnmux.nvidia.flashinfer.groups import View
from attnmux.nvidia.flashinfer.host_lens import check_tokens, on_host
from attnmux.nvidia.flashinfer.items import Items, check_items, lay_out


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Keys:
    """The pages of a view. Lengths are on the host, where plans are made."""

    indptr: torch.Tensor
    """[B + 1] int32, host."""
    last_page_len: torch.Tensor
    """[B] int32, host; 0 for a request without keys, which planning counts from it."""
    indices: torch.Tensor
    """[indptr[-1]] int32, device."""


class Step:
    """A batch with what its plans are made of. Raises InvalidInput without host lengths."""

    def __init__(self, batch: ForwardBatch, context: BackendContext, page_size: int) -> None:
        """page_size: of the view that kernels have of the pool."""
        self.batch = batch
        self.page_size = page_size
        self._pool: KVPool = context.token_to_kv_pool
        self._table = context.req_to_token_pool.req_to_token
        if batch.forward_mode.is_decode():
            self._kv_lens = on_host(batch, "seq_lens_cpu")
            self._q_lens = torch.ones_like(self._kv_lens)
            self._prefix_lens = self._kv_lens - 1
        else:
            self._q_lens = on_host(batch, "extend_seq_lens_cpu")
            self._prefix_lens = on_host(batch, "extend_prefix_lens_cpu")
            self._kv_lens = self._prefix_lens + self._q_lens
        self.qo_indptr = cu_seqlens(self._q_lens)
        """[B + 1] int32, host."""
        self.num_rows = int(self.qo_indptr[-1])
        """Rows of Q that belong to requests."""
        check_tokens(batch, self.num_rows)
        check_items(batch)
        # There is no host mirror of encoder lengths, so these synchronise.
        encoder = batch.encoder_lens
        self._encoder_lens = None if encoder is None else encoder.cpu()
        self._keys: dict[View, Keys] = {}
        self._items: Items | None = None

    @property
    def has_prefix(self) -> bool:
        return bool((self._prefix_lens > 0).any())

    @property
    def custom_mask(self) -> torch.Tensor | None:
        spec = self.batch.spec_info
        return None if spec is None else spec.custom_mask

    def items(self) -> Items | None:
        """Many items behind one prefix, laid out once."""
        multi_item = self.batch.multi_item
        if multi_item is not None and self._items is None:
            self._items = lay_out(multi_item, self.batch.positions, self._q_lens, self._kv_lens)
        return self._items

    def encoder_indptr(self) -> torch.Tensor:
        """[B + 1] int32, host: where each request's encoder tokens begin."""
        return cu_seqlens(self._of_encoder())

    def keys(self, view: View, buffers: Mapping[View, torch.Tensor] | None = None) -> Keys:
        """The keys of a view, made once. `buffers`: where the indices of each view go."""
        keys = self._keys.get(view)
        if keys is None:
            keys = self._keys[view] = self._build(view, None if buffers is None else buffers[view])
        return keys

    def _build(self, view: View, out: torch.Tensor | None) -> Keys:
        lens, start = self._stretch(view)
        page_size, device = self.page_size, self._table.device
        indptr = kv_indptr(lens, page_size=page_size)
        indices = kv_indices(
            self._table,
            self.batch.req_pool_indices,
            indptr.to(device, non_blocking=True),
            page_size=page_size,
            kv_start=None if start is None else start.to(device, non_blocking=True),
            total=int(indptr[-1]),
            out=out,
        )
        last_page_len = kv_last_page_len(lens, page_size).masked_fill_(lens == 0, 0)
        translated = self._translated(indices, view.layer_id)
        if out is not None and translated is not indices:
            translated = indices.copy_(translated)
        return Keys(indptr=indptr, last_page_len=last_page_len, indices=translated)

    def _stretch(self, view: View) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys a request, and the column of its row where they begin."""
        if view.cross:
            return self._of_encoder(), None
        if view.prefix:
            return self._prefix_lens, self._encoder_lens
        if view.window < 0:
            return self._kv_lens, self._encoder_lens
        return window_view(
            self._kv_lens,
            view.window,
            q_lens=self._q_lens,
            page_size=self.page_size,
            kv_start=self._encoder_lens,
        )

    def _of_encoder(self) -> torch.Tensor:
        if self._encoder_lens is None:
            raise InvalidInput("encoder_lens", came=None, expected="lengths for cross attention")
        return self._encoder_lens

    def _translated(self, indices: torch.Tensor, layer_id: int) -> torch.Tensor:
        if self.page_size == self._pool.page_size:
            return self._pool.translate_pages(indices, layer_id)
        return self._pool.translate(indices, layer_id)
