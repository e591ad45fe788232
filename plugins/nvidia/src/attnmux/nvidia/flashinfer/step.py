"""A step as flashinfer plans it: roles, lengths, pages of keys, many items after one prefix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch

from attnmux.core import BackendContext, ForwardBatch, ForwardMode, InvalidInput, MultiItem, Request
from attnmux.core.plugin import cu_seqlens, kv_indptr
from attnmux.nvidia.flashinfer.layers import View
from attnmux.nvidia.flashinfer.shared import check_tokens, host_lens, page_indices


def window_view(
    seq_lens: torch.Tensor,
    sliding_window_size: int,
    *,
    q_lens: torch.Tensor | int = 1,
    page_size: int = 1,
    kv_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys that the last q_lens tokens of each request can see: how many they are, and the
    column of the request's row where they begin, [B] int32 each.

    Token i sees keys j with i - w <= j <= i, so the view begins w keys before the first of these
    tokens; for one token it is the last w + 1 keys.

    seq_lens: [B] int32, all keys, the new tokens' own included (in verify seq + d).
    q_lens: new tokens a request, [B] int32 or one number for all; 1 is decode.
    page_size: the view begins at the start of a page, so it may begin with up to page_size - 1
    keys outside of the window, which the kernel masks.
    kv_start: [B] int32, the column where the request's keys begin; the view's starts add to it.
    """
    start = (seq_lens - q_lens - sliding_window_size).clamp_(min=0)
    start -= start % page_size
    return seq_lens - start, start if kv_start is None else start + kv_start


LONGEST = (1 << 16) - 1
"""Tokens of an item: the library counts them in 16 bits."""

FEW_ROWS = 16
"""Rows of the smallest tile, which serves steps of no more a request."""

KEY_TILE = {True: 512, False: 128}
"""By whether a step has few rows a request, the most keys that a tile of them advances by: 8 times
16 for one warp, or for each of four side by side (`get_num_warps_kv` in prefill.cuh)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Keys:
    """The pages of a view. Lengths are on the host, where plans are made."""

    indptr: torch.Tensor
    """[B + 1] int32, host."""
    last_page_len: torch.Tensor
    """[B] int32, host; 0 for a request without keys, which planning counts from it."""
    indices: torch.Tensor
    """[indptr[-1]] int32, device."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Items:
    """Many items after one prefix, as the paged kernels of fa2 want them: arguments of `plan`.

    Token i of a sequence then sees key j <= i if i or j lies in the prefix, or if i < j + p for the
    place p that is given for i (`logits_mask_multi_item_scoring` in prefill.cuh). The library
    counts p from 0 at a delimiter that its item does not see. In a batch the delimiter belongs to
    the item that it opens, so every place is one more.
    """

    prefix_lens: torch.Tensor
    """[B] uint32, device."""
    places: torch.Tensor
    """[B, width] uint16, device: of all tokens after the prefix; 0 of cached ones, which is not
    read."""
    longest: torch.Tensor
    """[B] uint16, device: the largest place. The kernel skips tiles of keys that lie further back,
    counted from the first token of its rows or the one after it: a place more than the largest
    distance. Never less than a tile: one that it skips to is loaded whole, also if it ends after
    the keys, and NaN in V does not go away with a weight of 0."""

    @classmethod
    def of(
        cls,
        items: MultiItem,
        positions: torch.Tensor,
        q_lens: torch.Tensor,
        kv_lens: torch.Tensor,
    ) -> Items:
        """positions: [T] int64. q_lens, kv_lens: [B] int32, host: new tokens and keys a request.

        Synchronises for sequences of 65536 tokens or more alone. Raises InvalidInput for an item
        that is too long for the library.
        """
        prefix_lens, width = items.prefix_lens, int(kv_lens.max())
        request = torch.repeat_interleave(q_lens).to(prefix_lens.device, non_blocking=True)
        column = positions[: len(request)] - prefix_lens[request]
        # A token of the prefix has no place: its value goes to a column that is not read.
        column = column.masked_fill(column < 0, width)
        places = torch.zeros(len(q_lens), width + 1, dtype=torch.int32, device=prefix_lens.device)
        places[request, column] = items.token_pos_in_items[: len(request)] + 1
        longest = places[:, :width].amax(1)
        if width > LONGEST and int(longest.max()) > LONGEST:
            raise InvalidInput(
                "multi_item.token_pos_in_items",
                got=f"an item of {int(longest.max())} tokens",
                expected=f"at most {LONGEST}, which flashinfer counts in 16 bits",
            )
        few_rows = len(request) <= FEW_ROWS * len(q_lens)
        return cls(
            prefix_lens=prefix_lens.to(torch.uint32),
            places=places.to(torch.uint16),
            longest=longest.clamp(min=KEY_TILE[few_rows]).to(torch.uint16),
        )


class Role(Enum):
    """The purpose of a wrapper. Wrappers of one step keep their plans side by side."""

    DECODE = auto()
    """One new token a request, keys in the pool."""
    PAGED = auto()
    """Many new tokens, all keys in the pool."""
    DRAFT = auto()
    """The same for a few draft tokens after long prefixes: fa2, which splits the keys."""
    MASKED = auto()
    """The same with a custom mask."""
    ITEMS = auto()
    """The same if tokens see a prefix and their own item alone."""
    PREFIX = auto()
    """Many new tokens against the keys before them, in the pool."""
    RAGGED = auto()
    """Many new tokens against K and V of the call, in cross attention those of the encoder."""


Wrappers = dict[tuple[Role, int], Any]
"""The library's wrappers, by role and number of the group of layers."""


def pool_role(batch: ForwardBatch) -> Role:
    """How a step reads all of its keys from the pool."""
    mode, spec = batch.forward_mode, batch.spec_info
    if mode.is_decode():
        return Role.DECODE
    if spec is not None and spec.custom_mask is not None:
        return Role.MASKED
    if batch.multi_item is not None:
        return Role.ITEMS
    if mode.is_target_verify() or mode.is_draft_extend():
        return Role.DRAFT
    return Role.PAGED


def planned_roles(request: Request, *, is_encoder: bool) -> list[Role]:
    """How steps of the request read their keys from the pool, or an encoder's from its call."""
    if is_encoder:
        return [Role.RAGGED]
    roles = {
        Role.DECODE: True,
        Role.MASKED: "verify" in request.phases and request.custom_mask,
        Role.ITEMS: "extend" in request.phases and request.multi_item,
    }
    return [role for role, is_planned in roles.items() if is_planned]


class FlashInferStep:
    """A planned step. A call attends to the parts of the keys that some roles read."""

    num_rows: int
    """Rows of Q that belong to requests; those that follow are padding."""
    in_pool: tuple[Role, ...]
    """The roles of a call whose K and V are in the pool already."""
    new: tuple[Role, ...]
    """The roles of a call that brings K and V which are in the pool too, as most do."""
    own: tuple[Role, ...]
    """The roles of a call whose keys are its own alone. Decode reads the pool."""
    wrappers: Wrappers
    """Planned for this step."""

    def __init__(self, batch: ForwardBatch, context: BackendContext, page_size: int) -> None:
        """page_size: of the view that kernels have of the pool.

        Raises InvalidInput without lengths on the host, and for items that no kernel masks by.
        """
        self.batch = batch
        self._context = context
        self._page_size = page_size
        if batch.forward_mode.is_decode():
            self._kv_lens = host_lens(batch, "seq_lens_cpu")
            self._q_lens = torch.ones_like(self._kv_lens)
            self._prefix_lens = self._kv_lens - 1
        else:
            self._q_lens = host_lens(batch, "extend_seq_lens_cpu")
            self._prefix_lens = host_lens(batch, "extend_prefix_lens_cpu")
            self._kv_lens = self._prefix_lens + self._q_lens
        self.qo_indptr = cu_seqlens(self._q_lens)
        """[B + 1] int32, host."""
        self.num_rows = int(self.qo_indptr[-1])
        check_tokens(batch, self.num_rows)
        _check_items(batch)
        # There is no host mirror of encoder lengths, so this synchronises.
        encoder = batch.encoder_lens
        self._encoder_lens = None if encoder is None else encoder.cpu()
        self._keys: dict[View, Keys] = {}
        self._items: Items | None = None
        self.in_pool = self.new = self.own = (pool_role(batch),)
        if not batch.forward_mode.is_decode():
            self.own = (Role.RAGGED,)
        self.wrappers = {}

    @property
    def has_prefix(self) -> bool:
        return bool((self._prefix_lens > 0).any())

    @property
    def custom_mask(self) -> torch.Tensor | None:
        spec = self.batch.spec_info
        return None if spec is None else spec.custom_mask

    def items(self) -> dict[str, Any]:
        """Arguments of `plan` for the step's many items, which are laid out once."""
        multi_item = self.batch.multi_item
        if multi_item is None:
            return {}
        if self._items is None:
            self._items = Items.of(multi_item, self.batch.positions, self._q_lens, self._kv_lens)
        return {
            "prefix_len_ptr": self._items.prefix_lens,
            "token_pos_in_items_ptr": self._items.places.view(-1),
            "token_pos_in_items_len": self._items.places.shape[1],
            "max_item_len_ptr": self._items.longest,
        }

    def encoder_indptr(self) -> torch.Tensor:
        """[B + 1] int32, host: where each request's encoder tokens begin."""
        return cu_seqlens(self._of_encoder())

    def keys(self, view: View, buffers: Mapping[View, torch.Tensor] | None = None) -> Keys:
        """The keys of a view, made once. `buffers`: where the indices of each view go."""
        keys = self._keys.get(view)
        if keys is None:
            lens, start = self._stretch(view)
            indptr = kv_indptr(lens, page_size=self._page_size)
            indices = page_indices(
                self.batch,
                indptr,
                view.layer_id,
                self._context,
                page_size=self._page_size,
                kv_start=start,
                out=None if buffers is None else buffers[view],
            )
            last = ((lens - 1) % self._page_size + 1).masked_fill_(lens == 0, 0)
            keys = Keys(indptr=indptr, last_page_len=last, indices=indices)
            self._keys[view] = keys
        return keys

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
            page_size=self._page_size,
            kv_start=self._encoder_lens,
        )

    def _of_encoder(self) -> torch.Tensor:
        if self._encoder_lens is None:
            raise InvalidInput("encoder_lens", got=None, expected="lengths for cross attention")
        return self._encoder_lens


def _check_items(batch: ForwardBatch) -> None:
    if batch.multi_item is None:
        return
    masked = batch.spec_info is not None and batch.spec_info.custom_mask is not None
    if masked or batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED):
        raise InvalidInput(
            "multi_item",
            got=f"many items in {batch.forward_mode.name}{' with a custom mask' * masked}",
            expected="None, or a step of EXTEND or MIXED without a custom mask",
        )
