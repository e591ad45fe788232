"""The slots of a step's tokens, and the contents of the pools before it runs.

Pages are scattered. Those that no request owns hold NaN, as does the reserved page, and table
entries after a request's end are stale and point there. A request's own pages hold left-over values
besides its cached tokens: large ones, so that reading them shows, and finite ones, since a kernel
may load a whole page and give the values after the request's end weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from attnmux.core import ForwardMode, KVPool, LayerSpec, SWAKVPool
from attnmux.testing.cases.case import Step
from attnmux.testing.setup.case import CaseSetup, pages_of

LEFT_OVER = 100.0
"""The left-over value of finished requests. In a step with padding the reserved page holds it too,
so that padding rows are finite."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placed:
    """One request of a step, padding included."""

    length: int
    """Keys, the new tokens included."""
    new: int
    encoder: int
    new_encoder: int
    """Encoder tokens that this step writes: all or none."""
    row: int
    """Row of the request table."""
    slots: torch.Tensor
    """[encoder + length] int64: the encoder's tokens, then the request's own."""

    @property
    def cached(self) -> int:
        return self.length - self.new

    @property
    def cached_slots(self) -> torch.Tensor:
        return self.slots[self.encoder : self.encoder + max(self.cached, 0)]

    @property
    def new_slots(self) -> torch.Tensor:
        """Slots that the new tokens are written to; slot 0 for a request without keys."""
        if self.cached < 0:
            return self.slots.new_zeros(1)
        return self.slots[self.encoder + self.cached :]

    @property
    def encoder_slots(self) -> torch.Tensor:
        return self.slots[: self.encoder]


def place(
    setup: CaseSetup, step: Step, seq_len_fill: int, *, first_pages: torch.Tensor
) -> list[Placed]:
    """Give every request a row and slots, and write them to the request table.

    first_pages: [n] int64, on the host, for the first requests. Other pages are drawn.
    """
    pool, table = setup.context.token_to_kv_pool, setup.context.req_to_token_pool.req_to_token
    page_size = pool.page_size
    first_page, first_row = setup.case.first_page, setup.case.first_row
    num_pages = pool.size // page_size + 1 - first_page
    pages = torch.randperm(num_pages, generator=setup.generator) + first_page
    pages = torch.cat([first_pages, pages[~torch.isin(pages, first_pages)]])
    num_shared = step.shared_prefix // page_size
    whole, pages = pages[:num_shared], pages[num_shared:]
    num_sharing = len(step.lens) if step.sharing is None else step.sharing
    rows = torch.randperm(table.shape[0] - first_row, generator=setup.generator) + first_row
    requests = []
    for index, total in enumerate(step.totals):
        shared = whole if index < num_sharing else whole[:0]
        count = pages_of(total, page_size) - len(shared)
        own, pages = pages[:count], pages[count:]
        slots = slots_of(torch.cat([shared, _out_of_order(own)]), page_size)[:total]
        encoder = step.encoder[index] if step.encoder else 0
        is_first = step.mode is not ForwardMode.DECODE and step.cached[index] == 0
        requests.append(
            Placed(
                length=step.lens[index],
                new=step.new[index],
                encoder=encoder,
                new_encoder=encoder if is_first else 0,
                row=int(rows[index]),
                slots=slots.to(pool.device),
            )
        )
    _write_table(setup, requests, stale=slots_of(pages, page_size))
    if isinstance(pool, SWAKVPool):
        _pair(setup, pool, requests)
    return requests + [_padding(step, seq_len_fill, pool.device)] * step.padding


def fill_pool(
    setup: CaseSetup, requests: list[Placed], *, has_padding: bool, zeroed: torch.Tensor
) -> None:
    """Random K and V for cached tokens, left-overs in the rest of their pages, NaN elsewhere.

    zeroed: [n] int64, pages whose rest keeps the values that it has, except in a window pool, which
    pairs other pages with them.
    """
    pool = setup.context.token_to_kv_pool
    real = [request for request in requests if request.row]
    no_slots = torch.zeros(0, dtype=torch.int64, device=pool.device)
    owned = torch.cat([no_slots, *(request.slots // pool.page_size for request in real)])
    if has_padding:
        owned = torch.cat([owned, owned.new_zeros(1)])
    in_owned_pages = slots_of(torch.unique(owned).cpu(), pool.page_size).to(pool.device)
    cached = torch.cat([no_slots, *(request.cached_slots for request in real)])
    encoder = torch.cat(
        [no_slots, *(request.encoder_slots for request in real if not request.new_encoder)]
    )
    zeroed_slots = slots_of(zeroed, pool.page_size).to(pool.device)
    for layer in setup.context.layers:
        slots = pool.translate(encoder if layer.is_cross_attention else cached, layer.layer_id)
        # Tokens that fell out of the window translate to the reserved page, which is finite
        slots = slots[slots > 0]
        left_over = pool.translate(in_owned_pages, layer.layer_id)
        if bool((left_over == 0).any()):
            left_over = torch.cat([left_over, torch.arange(pool.page_size, device=pool.device)])
        kept_slots = zeroed_slots if pool.slot_map(layer.layer_id) is None else no_slots
        for buffer in buffers(setup, layer.layer_id):
            kept = KVPool.gather_rows(buffer, kept_slots)
            for part in in_use(setup, buffer):
                _fill_with_nan(part)
            _leave_over(buffer, left_over)
            put(buffer, kept_slots, kept)
        drawn = tuple(setup.random(len(slots), *shape) for shape in row_shapes(setup, layer))
        for buffer, rows in zip(
            buffers(setup, layer.layer_id), stored_rows(setup, layer, drawn), strict=True
        ):
            put(buffer, slots, rows)


def fill_reserved_page(setup: CaseSetup) -> None:
    """Left-overs in page 0, for padding rows that a graph adds to a step."""
    pool = setup.context.token_to_kv_pool
    slots = torch.arange(pool.page_size, device=pool.device)
    for layer in setup.context.layers:
        for buffer in buffers(setup, layer.layer_id):
            _leave_over(buffer, slots)


def _fill_with_nan(buffer: torch.Tensor) -> None:
    """A value of 4 bits is never NaN, but its block's scale is."""
    if buffer.dtype == torch.float4_e2m1fn_x2:
        buffer.view(torch.uint8).fill_(0xFF)
    else:
        buffer.fill_(torch.nan)


def _leave_over(buffer: torch.Tensor, slots: torch.Tensor) -> None:
    shape = len(slots), *buffer.shape[1:]
    if buffer.dtype == torch.float4_e2m1fn_x2:
        left_over = torch.full(shape, 0x77, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    else:
        left_over = torch.full(shape, LEFT_OVER).to(buffer.dtype)
    put(buffer, slots, left_over.to(buffer.device))


def row_shapes(setup: CaseSetup, layer: LayerSpec) -> tuple[tuple[int, int], ...]:
    """[H, D] of K and V, or of whole rows of MLA."""
    heads = layer.tp_k_head_num
    keys = heads, layer.qk_head_dim
    return (keys,) if setup.case.latent else (keys, (heads, layer.v_head_dim))


def stored_rows(
    setup: CaseSetup, layer: LayerSpec, rows: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Rows of K and V, or whole rows of MLA, as the layer's `buffers` store them."""
    dtype = setup.context.token_to_kv_pool.dtype
    scales = (layer.k_scale, layer.v_scale)
    parts = [
        KVPool.stored_parts(values, dtype, scale)
        for values, scale in zip(rows, scales, strict=False)
    ]
    return tuple(chain.from_iterable(zip(*parts, strict=True)))


def put(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows of the buffer's dtype as bytes, which torch supports for every dtype."""
    # A clone, since heads of one value have any stride in a tensor that counts as contiguous
    rows = rows.clone(memory_format=torch.contiguous_format)
    buffer.view(torch.uint8)[slots] = rows.view(torch.uint8)


def buffers(setup: CaseSetup, layer_id: int) -> tuple[torch.Tensor, ...]:
    """The pool's memory of a layer: as `KVPool.memory`, or the one buffer of MLA."""
    pool = setup.context.token_to_kv_pool
    if setup.case.latent:
        return (pool.get_key_buffer(layer_id),)
    return pool.memory(layer_id)


def in_use(setup: CaseSetup, buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts of a buffer that the case uses, as views: all of it, or the reserved page and what
    lies from the case's first page on."""
    page_size, first_page = setup.case.page_size, setup.case.first_page
    if first_page == 1:
        return (buffer,)
    return buffer[:page_size], buffer[first_page * page_size :]


def rows_in_use(setup: CaseSetup, buffer: torch.Tensor) -> torch.Tensor:
    """The rows of `in_use`, one part after the other: the buffer itself if it is the only one."""
    parts = in_use(setup, buffer)
    if len(parts) == 1:
        return buffer
    return torch.cat([part.view(torch.uint8) for part in parts]).view(buffer.dtype)


def places_in_use(setup: CaseSetup, slots: torch.Tensor) -> torch.Tensor:
    """The places of slots in `rows_in_use`."""
    gap = (setup.case.first_page - 1) * setup.case.page_size
    return torch.where(slots < setup.case.page_size, slots, slots - gap)


def slots_of(pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Every slot of the pages, page after page."""
    in_page = torch.arange(page_size, device=pages.device)
    return (pages.unsqueeze(1) * page_size + in_page).flatten()


def _out_of_order(pages: torch.Tensor) -> torch.Tensor:
    in_order = len(pages) > 1 and bool((pages.diff() > 0).all())
    return pages.flip(0) if in_order else pages


def _write_table(setup: CaseSetup, requests: list[Placed], stale: torch.Tensor) -> None:
    table = setup.context.req_to_token_pool.req_to_token
    used = table[setup.case.first_row - 1 :]
    picks = torch.randint(len(stale), used.shape, generator=setup.generator)
    used.copy_(stale[picks])
    table[0] = 0
    for request in requests:
        table[request.row, : len(request.slots)] = request.slots.int()


def _pair(setup: CaseSetup, pool: SWAKVPool, requests: list[Placed]) -> None:
    """Pair the pages that a new token still sees with scattered pages of the window pool."""
    widest = max(layer.sliding_window_size for layer in setup.context.layers)
    seen = set()
    for request in requests:
        behind = SWAKVPool.tokens_behind_window(max(request.cached, 0), widest, pool.page_size)
        seen.update((request.slots[behind :: pool.page_size] // pool.page_size).tolist())
    pages = torch.tensor(sorted(seen), dtype=torch.int64)
    swa_pages = torch.randperm(pool.swa.size // pool.page_size, generator=setup.generator) + 1
    pool.unpair(torch.arange(pool.num_slots // pool.page_size, device=pool.device))
    pool.pair(pages.to(pool.device), swa_pages[: len(pages)].to(pool.device))


def _padding(step: Step, seq_len_fill: int, device: torch.device) -> Placed:
    new = 1
    length = 1
    if step.mode is ForwardMode.DECODE:
        length = seq_len_fill
    elif step.mode is ForwardMode.TARGET_VERIFY:
        new = step.new[0]
        length = seq_len_fill + new
    slots = torch.zeros(length, dtype=torch.int64, device=device)
    return Placed(length=length, new=new, encoder=0, new_encoder=0, row=0, slots=slots)
