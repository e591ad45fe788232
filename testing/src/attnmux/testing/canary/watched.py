"""Watches slots of a KV pool for changes that no step should have made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from attnmux.core import KVPool


class Change(NamedTuple):
    """A slot of a layer's buffer whose bits changed."""

    layer_id: int
    slot: int
    before: int
    """Its hash when it was recorded."""
    after: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Record:
    """Hashes of a layer's slots in the last checked step."""

    slots: torch.Tensor
    """[n] int64, of the layer's buffer."""
    hashes: torch.Tensor
    """[n] int64."""
    own: torch.Tensor
    """[n] bool: the step will write the slot itself."""


class WatchedSlots:
    """Hashes of some slots of some layers, recorded in one checked step and compared in the next.

    Half of the slots are drawn from those that the step's requests read, and half from the whole
    pool. A pool with no more slots than `count` is watched whole. Writes of unchecked steps are
    noted too, so that a slot that a step rewrote is not reported.
    """

    def __init__(self, pool: KVPool, *, count: int, generator: torch.Generator) -> None:
        """count: slots of each layer."""
        self._pool, self._count, self._generator = pool, count, generator
        self._group_layer = {pool.group_of(layer_id): layer_id for layer_id in pool.layer_ids}
        with torch.inference_mode(False):  # written in steps of either kind
            self._written = {
                group: torch.zeros(
                    len(pool.get_key_buffer(layer_id)), dtype=torch.bool, device=pool.device
                )
                for group, layer_id in self._group_layer.items()
            }
        self._mixers: dict[int, torch.Tensor] = {}
        self._records: dict[int, _Record] = {}

    def note_writes(self, loc: torch.Tensor) -> None:
        """Note that a step writes slots loc [n] of the request table. Does not synchronise."""
        for group, layer_id in self._group_layer.items():
            self._written[group].index_fill_(0, self._pool.translate(loc, layer_id), True)

    def changed_since_recorded(self, read: torch.Tensor) -> Iterator[Change]:
        """Yield recorded slots that a request reads and that changed although no step wrote them.

        read: [n] int64, the slots of the request table that the step's requests hold.
        """
        for layer_id, record in self._records.items():
            group = self._pool.group_of(layer_id)
            is_read = self._mask(layer_id, read)[record.slots]
            meant = is_read & ~self._written[group][record.slots] & ~record.own
            yield from _changes(layer_id, record, self._hashes(layer_id, record.slots), meant)

    def record(self, layer_ids: Sequence[int], read: torch.Tensor, loc: torch.Tensor) -> None:
        """Replace all records, before a step that writes slots loc."""
        for written in self._written.values():
            written.zero_()
        self._records = {}
        drawn: dict[int, torch.Tensor] = {}
        for layer_id in layer_ids:
            group = self._pool.group_of(layer_id)
            if group not in drawn:
                drawn[group] = self._draw(layer_id, read)
            slots = drawn[group]
            self._records[layer_id] = _Record(
                slots=slots,
                hashes=self._hashes(layer_id, slots),
                own=self._mask(layer_id, loc)[slots],
            )

    def changed_by_call(self, layer_id: int) -> Iterator[Change]:
        """Yield slots that changed during the layer's call and that the step does not write.

        Afterwards the step's own slots are watched too.
        """
        record = self._records.get(layer_id)
        if record is None:
            return
        now = self._hashes(layer_id, record.slots)
        yield from _changes(layer_id, record, now, ~record.own)
        self._records[layer_id] = replace(record, hashes=now, own=torch.zeros_like(record.own))

    def forget(self) -> None:
        """Drop all records. Call this when anything but a step has written to the pool."""
        self._records = {}

    def _draw(self, layer_id: int, read: torch.Tensor) -> torch.Tensor:
        pool = self._pool
        first, end = pool.page_size, len(pool.get_key_buffer(layer_id))
        if end - first <= self._count:
            return torch.arange(first, end, device=pool.device)
        half = self._count // 2
        drawn = torch.randint(first, end, (half,), generator=self._generator).to(pool.device)
        if len(read):
            picks = torch.randint(len(read), (half,), generator=self._generator).to(pool.device)
            of_requests = pool.translate(read[picks], layer_id)
            drawn = torch.cat([drawn, of_requests[of_requests >= first]])
        return torch.unique(drawn)  # type: ignore[no-any-return]  # torch's own

    def _mask(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """[slots of the layer's buffer] bool, without the reserved page."""
        mask = torch.zeros_like(self._written[self._pool.group_of(layer_id)])
        mask[self._pool.translate(slots, layer_id)] = True
        mask[: self._pool.page_size] = False
        return mask

    def _hashes(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """[n] int64: a multilinear hash of each slot's K and V.

        Arithmetic is modulo 2^64 and every multiplier is odd, so that a change of any one word
        changes the hash.
        """
        total = torch.zeros(len(slots), dtype=torch.int64, device=self._pool.device)
        for buffer in kv_memory(self._pool, layer_id):
            raw = rows_at(buffer, slots)
            words = raw.view(torch.int64) if raw.shape[1] % 8 == 0 else raw.long()
            total = total * 31 + (words * self._mixer(words.shape[1])).sum(1)
        return total

    def _mixer(self, width: int) -> torch.Tensor:
        if width not in self._mixers:
            drawn = torch.randint(-(2**62), 2**62, (width,), generator=self._generator)
            self._mixers[width] = (drawn * 2 + 1).to(self._pool.device)
        return self._mixers[width]


def _changes(
    layer_id: int, record: _Record, now: torch.Tensor, meant: torch.Tensor
) -> Iterator[Change]:
    for index in ((now != record.hashes) & meant).nonzero().flatten().tolist():
        slot, before = int(record.slots[index]), int(record.hashes[index])
        yield Change(layer_id, slot, before, int(now[index]))


def kv_memory(pool: KVPool, layer_id: int) -> tuple[torch.Tensor, ...]:
    """A layer's buffers, as `KVPool.memory`; the one buffer of MLA, where V is part of K."""
    keys, values, *scales = pool.memory(layer_id)
    return (keys,) if keys.data_ptr() == values.data_ptr() else (keys, values, *scales)


def rows_at(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The bytes of a buffer's rows, [n, bytes] uint8."""
    return KVPool.gather_rows(buffer, slots).contiguous().flatten(1).view(torch.uint8)
