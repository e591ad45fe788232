"""The interface of KV pools: slots of every layer, and how they are written and read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from attnmux.core.contract.arguments import check_vector, check_whole_pages
from attnmux.core.contract.dtypes import (
    ACTIVATION_DTYPES,
    FP4_DTYPE,
    FP8_DTYPES,
    SCALED_DTYPES,
    STORABLE_DTYPES,
    checked_scale,
)
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.contract.memory import allocate_zeroed, free_memory
from attnmux.core.contract.quantise import quantise, stored_parts, unpack_rows
from attnmux.core.contract.rows import gather_rows, scatter_rows
from attnmux.core.facts.errors import InvalidInput


class KVPool(ABC):
    """K and V of every token, by layer and slot.

    There are `size + page_size` slots. Page 0 is reserved: padding writes to slot 0, and slots
    1 … page_size - 1 stay unused, so that usable pages start at 1. Buffers are [slots, Hkv, D] and
    can be viewed as [pages, page_size, Hkv, D].
    Attention reads K and V from the pool, including those that its own call has just written. A
    pool of 8-bit or 4-bit floats has rounded them, and every step must see the same values.
    Buffers of 4-bit floats hold two values an element, [slots, Hkv, D / 2], and come with those of
    `get_scale_buffers`.
    """

    ACTIVATION_DTYPES = ACTIVATION_DTYPES
    FP8_DTYPES = FP8_DTYPES
    allocate_zeroed = staticmethod(allocate_zeroed)
    free_memory = staticmethod(free_memory)
    gather_rows = staticmethod(gather_rows)
    scatter_rows = staticmethod(scatter_rows)
    quantise = staticmethod(quantise)
    stored_parts = staticmethod(stored_parts)
    unpack_rows = staticmethod(unpack_rows)

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_ids: Sequence[int],
        device: torch.device | str,
    ) -> None:
        check_whole_pages(size, page_size)
        stored = (*STORABLE_DTYPES, FP4_DTYPE)
        if dtype not in stored:
            names = ", ".join(str(known).removeprefix("torch.") for known in stored)
            raise InvalidInput("dtype", got=dtype, expected=f"one of {names}")
        self.size = size
        """Tokens that can be stored, without the reserved page."""
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self._number(layer_ids)
        if len(self._index_by_layer) != len(self.layer_ids):
            raise InvalidInput(
                "layer_ids", got=f"{list(self.layer_ids)}", expected="a different id for each"
            )

    def _number(self, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        """Ids of the layers stored here; they may start above 0 and have gaps."""
        self._index_by_layer = {layer_id: index for index, layer_id in enumerate(self.layer_ids)}

    @property
    def num_slots(self) -> int:
        """Slots of a buffer, the reserved page included."""
        return self.size + self.page_size

    @property
    def is_strided(self) -> bool:
        """Whether slots or heads have gaps between them; requests say so with `strided_kv`."""
        return False

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the buffers take."""

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes of all layers: `dtype`, and in a `JoinedKVPool` perhaps others."""
        return frozenset((self.dtype,))

    def of_layers(self, layer_ids: Iterable[int]) -> KVPool:
        """The same memory as the pool of these layers, so that `dtype` is theirs. A pool of one
        dtype returns itself, with all its layers."""
        return self

    @abstractmethod
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """K of a layer, [slots, Hkv, D], the pool's own memory.

        Raises InvalidInput for a layer that is not stored here.
        """

    @abstractmethod
    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """V of a layer, [slots, Hkv, Dv], the pool's own memory.

        Raises InvalidInput for a layer that is not stored here.
        """

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer."""
        return self.get_key_buffer(layer_id), self.get_value_buffer(layer_id)

    def get_scale_buffers(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The scales of a layer's blocks of 4-bit floats, of any strides: those of K
        [slots, Hkv, D / 16] and of V [slots, Hkv, Dv / 16], e4m3. None for other dtypes.

        The heads' scales begin at multiples of 4 bytes. See `contract/quantise.py`.
        Raises InvalidInput for a layer that is not stored here.
        """
        self._layer_index(layer_id)
        return None

    def memory(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """All that a slot of a layer holds: K, V and, of 4-bit floats, both of their scales."""
        return (*self.get_kv_buffer(layer_id), *(self.get_scale_buffers(layer_id) or ()))

    def set_kv_buffer(
        self,
        layer: LayerSpec,
        loc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_scale: float | None = None,
        v_scale: float | None = None,
    ) -> None:
        """Write K [T, Hkv, D] and V [T, Hkv, Dv] to slots loc [T] int64.

        A pool of 8-bit or 4-bit floats divides by the scales (None means 1), rounds and saturates;
        see `stored_parts`. Any other pool casts the values to its dtype and ignores the scales.
        Does not synchronise.
        Raises InvalidInput, before anything is written, for wrong shapes, dtypes or devices, and
        for scales that are used and not positive.
        """
        raise InvalidInput(
            "layer", got=f"K and V for {type(self).__name__}", expected="an MLA latent"
        )

    def zero(self, slots: torch.Tensor | None = None) -> None:
        """Overwrite K and V of slots [n] int64 with 0 in every layer; None means the whole pool.

        For slots that may hold NaN or infinities, before they are freed: the next owner of a page
        may load its rest and multiply it by 0. Does not synchronise.
        Raises InvalidInput for slots that are no vector of int64.
        """
        if slots is not None:
            check_vector("slots", slots, torch.int64)
        for layer_id in self.layer_ids:
            loc = None if slots is None else self.translate(slots, layer_id)
            for buffer in self.memory(layer_id):
                raw = buffer.view(torch.uint8)  # torch fills few rows of few dtypes
                if loc is None:
                    raw.zero_()
                else:
                    raw.index_fill_(0, loc, 0)

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy K and V from slots source [n] int64 to slots target [n] int64 in every layer.

        All are read before one is written, so that the two may overlap. No slot is written twice.
        Does not synchronise.
        Raises InvalidInput, before anything is written, for other dtypes and lengths.
        """
        check_vector("target", target, torch.int64, check_vector("source", source, torch.int64))
        for layer_id in self.layer_ids:
            read, write = self.translate(source, layer_id), self.translate(target, layer_id)
            # As bytes, since 8-bit floats cannot be indexed; both first, since V may be part of K
            buffers = [data.view(torch.uint8) for data in self.memory(layer_id)]
            rows = [data.index_select(0, read) for data in buffers]
            for buffer, values in zip(buffers, rows, strict=True):
                buffer.index_copy_(0, write, values)

    def set_mla_kv_buffer(
        self,
        layer: LayerSpec,
        loc: torch.Tensor,
        k_nope: torch.Tensor,
        k_rope: torch.Tensor,
        k_scale: float | None = None,
    ) -> None:
        """Write latents [T, 1, rank] and rotary keys [T, 1, rope] to slots loc [T] int64.

        One scale serves the whole row: V is part of it, and one factor de-quantises a logit.
        Otherwise like `set_kv_buffer`.
        """
        raise InvalidInput(
            "layer", got=f"an MLA latent for {type(self).__name__}", expected="K and V"
        )

    def read_scales(self, k_scale: float | None, v_scale: float | None) -> tuple[float, float]:
        """The factors that K and V from the buffers are multiplied by, for a layer's scales.

        Both are 1 unless the pool stores 8-bit or 4-bit floats. Then they are the scales, with 1
        for None; an MLA pool returns k_scale for both, since V is part of K.
        Raises InvalidInput for a scale that is used and not positive.
        """
        if self.dtype not in SCALED_DTYPES:
            return 1.0, 1.0
        return checked_scale(k_scale), checked_scale(v_scale)

    def translate(self, slots: torch.Tensor, layer_id: int) -> torch.Tensor:
        """Convert slots of the request table, int32 or int64 of any shape, to slots of the buffer
        that holds `layer_id`.

        They are equal unless the pool keeps some layers in a smaller buffer of their own. Slot 0
        stays 0. It is a gather of static shape, so a device graph reads the table at each replay.
        """
        return slots

    def slot_map(self, layer_id: int) -> torch.Tensor | None:
        """The table that `translate` reads, for kernels that translate themselves: [slots] int32 or
        int64, at a fixed address, from slots of the request table to slots of the layer's buffer.

        None if the two are equal, or if `translate` is more than a look-up.
        """
        return None

    def translate_pages(self, pages: torch.Tensor, layer_id: int) -> torch.Tensor:
        """Like `translate`, for pages.

        Build a page table or the pages of `kv_indices` once for a group of layers, from the
        request table, and translate it: lengths and padding stay the same.
        """
        return pages

    def group_of(self, layer_id: int) -> int:
        """The group of a layer. Layers of one group have the same `translate`, so that metadata
        with slots is built once for each (window, group).
        """
        return 0

    def _allocate(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, what: str
    ) -> list[torch.Tensor]:
        """A zeroed buffer of each shape."""
        return allocate_zeroed(
            shapes,
            dtype=dtype,
            device=self.device,
            what=f"{what} of {self.size} tokens in {len(self.layer_ids)} layers",
            hint="lower the number of tokens (size) or take a smaller KV dtype",
        )

    def check_whole_bytes(self, reader: str) -> None:
        """Raise InvalidInput if an element holds two values: `reader` takes it for one."""
        if self.dtype == FP4_DTYPE:
            expected = f"8 bits or more: no 4-bit floats for {reader}"
            raise InvalidInput("dtype", got="fp4_e2m1", expected=expected)

    def _layer_index(self, layer_id: int) -> int:
        try:
            return self._index_by_layer[layer_id]
        except KeyError:
            raise InvalidInput(
                "layer_id", got=layer_id, expected=f"one of {list(self.layer_ids)}"
            ) from None


class KVWriter(Protocol):
    """Writes the new tokens' rows to a KV pool."""

    def write(
        self,
        layer: LayerSpec,
        loc: torch.Tensor,
        first: torch.Tensor,
        second: torch.Tensor,
        *,
        is_latent: bool,
    ) -> None:
        """Write rows to slots loc [T] int64, bit for bit as the pool's own method does.

        first, second: K [T, Hkv, D] and V [T, Hkv, Dv]; of a latent pool the latents [T, 1, rank]
        and the rotary keys [T, 1, rope]. Does not synchronise.
        Raises the errors of the pool's method, before anything is written.
        """
