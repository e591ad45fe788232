"""One step's lengths, the pages of its keys, the parts that plans serve, and the plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from attnmux.core import BackendContext, ForwardBatch, InvalidInput
from attnmux.core.plugin import cu_seqlens, kv_indptr
from attnmux.nvidia.flashinfer.shared import check_tokens, host_lens, page_indices
from attnmux.nvidia.flashinfer_mla.kernels import FlashInferMLAKernels

TILE = 128
"""Rows of a tile, a row being a head of a token. Short requests have tiles of half as many, and
then no more than two a request."""

PLAN_TILES = 16384 - 512
"""Tiles that a plan holds. It has room for 16384 works (`max_total_num_works` in scheduler.cuh),
writes past them unchecked, and makes up to a work for each SM of those whose keys are split."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """The requests of one plan. The first and the last may have only some of their rows in it.

    Rows of a request see no keys after themselves, so parts that end early have fewer keys.
    All on the host.
    """

    rows: slice
    qo_indptr: torch.Tensor
    """[B + 1] int32, from 0 on."""
    kv_indptr: torch.Tensor
    """[B + 1] int32, from 0 on: where each request's pages begin among those of the part."""
    kv_lens: torch.Tensor
    """[B] int32."""
    starts: torch.Tensor | None = None
    """[B] int32: where each request's pages begin among those of the step. None if the part has all
    of them."""

    @property
    def num_pages(self) -> int:
        """How many pages of the step the part reaches."""
        ends = self.kv_indptr[1:] if self.starts is None else self.starts + self.kv_indptr.diff()
        return int(ends.max())

    def lens(self) -> dict[str, torch.Tensor]:
        """By the library's names."""
        return {
            "qo_indptr": self.qo_indptr,
            "kv_indptr": self.kv_indptr,
            "kv_len_arr": self.kv_lens,
        }

    def indices(self, of_step: torch.Tensor) -> torch.Tensor:
        """The part's pages, of those of the step. `plan` wants them end to end."""
        if self.starts is None:
            return of_step
        counts = self.kv_indptr.diff().tolist()
        stretches = zip(self.starts.tolist(), counts, strict=True)
        return torch.cat([of_step[start : start + count] for start, count in stretches])


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentGroup:
    """The facts that a plan fixes. Layers that agree on them share one."""

    num_heads: int
    scaling: float
    pool_group: int
    """See `KVPool.group_of`."""
    layer_id: int = field(compare=False)
    """One of the layers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Planned:
    """A step's plan for a group of layers."""

    kernels: FlashInferMLAKernels
    num_heads: int
    """Heads of Q as the kernels get it."""
    num_rows: int
    """Rows of Q that belong to requests."""
    calls: tuple[tuple[slice | None, Any], ...]
    """Rows of Q, None for all, and the wrapper that is planned for them: one, but in the longest
    steps."""
    slots: torch.Tensor
    """[keys] int32: the pool's rows, which are read from there if they are widened."""

    def attend(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        latents: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Write the rows of requests to `out` [T, Hq, 512], and their natural LSE."""
        num_rows, num_heads = self.num_rows, out.shape[1]
        if self.num_heads == num_heads:
            self._run(q, q_rope, latents, out, lse)
            return
        q, q_rope = _padded(q, self.num_heads), _padded(q_rope, self.num_heads)
        wide_out = torch.empty_like(q)
        wide_lse = None if lse is None else lse.new_empty(q.shape[:2])
        self._run(q, q_rope, latents, wide_out, wide_lse)
        out[:num_rows].copy_(wide_out[:num_rows, :num_heads])
        if lse is not None and wide_lse is not None:
            lse[:num_rows].copy_(wide_lse[:num_rows, :num_heads])

    def _run(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        latents: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        for rows, wrapper in self.calls:
            if rows is None:
                self.kernels.run(wrapper, (q, q_rope), latents, out=out, lse=lse)
                continue
            query, part = (q[rows], q_rope[rows]), None if lse is None else lse[rows]
            self.kernels.run(wrapper, query, latents, out=out[rows], lse=part)


class FlashInferMLAStep:
    """A batch, the inputs of its plans, and the plans."""

    in_pool: dict[LatentGroup, Planned]
    """For each group of layers: plans over keys in the pool."""
    in_call: dict[LatentGroup, Planned]
    """Plans over keys that a call brings, made when the first such call comes."""

    num_rows: int
    """Rows of Q that belong to requests."""
    is_causal: bool
    """Whether rows see different keys: a request's only row sees all of its keys."""

    def __init__(self, batch: ForwardBatch, context: BackendContext, page_size: int) -> None:
        """page_size: of the view that kernels have of the pool.

        Raises InvalidInput for masks, items, picked keys, and without lengths on the host.
        """
        _check_served(batch)
        self.batch = batch
        self._context = context
        self._page_size = page_size
        if batch.forward_mode.is_decode():
            self._kv_lens = host_lens(batch, "seq_lens_cpu")
            self._q_lens = torch.ones_like(self._kv_lens)
            least, most, self.num_rows = 1, 1, len(self._q_lens)
        else:
            self._q_lens = host_lens(batch, "extend_seq_lens_cpu")
            kv_lens = host_lens(batch, "extend_prefix_lens_cpu") + self._q_lens
            self._kv_lens = kv_lens.masked_fill_(self._q_lens == 0, 0)
            lens: list[int] = self._q_lens.tolist()
            least, most, self.num_rows = min(lens, default=1), max(lens, default=0), sum(lens)
        self._all_have_rows = least > 0
        self.is_causal = most > 1
        check_tokens(batch, self.num_rows)
        self._kv_indptr = kv_indptr(self._kv_lens, page_size=page_size)
        self._indices: dict[int, torch.Tensor] = {}
        self.in_pool, self.in_call = {}, {}

    def parts(self, num_heads: int, *, of_call: bool) -> tuple[Part, ...]:
        """The contents of plans for that many heads, in the order of the rows.

        of_call: the keys are those that the call brings, one page each.
        """
        q_lens, kv_lens, bounds = self._q_lens, self._kv_lens, self._kv_indptr
        if of_call:
            kv_lens, bounds = q_lens, kv_indptr(q_lens)
        if not self._all_have_rows:
            # Those without rows have no pages either.
            has_rows = q_lens > 0
            bounds = torch.cat([bounds[:-1][has_rows], bounds[-1:]])
            q_lens, kv_lens = q_lens[has_rows], kv_lens[has_rows]
        tiles = self.num_rows * num_heads // TILE + 2 * len(q_lens)
        if tiles <= PLAN_TILES:
            rows = slice(0, self.num_rows)
            qo_indptr = cu_seqlens(q_lens)
            return (Part(rows=rows, qo_indptr=qo_indptr, kv_indptr=bounds, kv_lens=kv_lens),)
        parts, first_row = [], 0
        for cut in _cut(q_lens, kv_lens, bounds[:-1], num_heads):
            part = _part(first_row, *cut, 1 if of_call else self._page_size)
            parts.append(part)
            first_row = part.rows.stop
        return tuple(parts)

    def indices(self, group: LatentGroup, out: torch.Tensor | None = None) -> torch.Tensor:
        """The pages of all requests end to end, int32, made once for each group of the pool.

        out: where they go. All of it is returned, with its former content after them: a graph's
        plans are given all of it, since later steps have other lengths.
        """
        indices = self._indices.get(group.pool_group)
        if indices is None:
            indices = page_indices(
                self.batch,
                self._kv_indptr,
                group.layer_id,
                self._context,
                page_size=self._page_size,
                out=out,
            )
            if out is not None:
                indices = out
            self._indices[group.pool_group] = indices
        return indices


def _padded(q: torch.Tensor, num_heads: int) -> torch.Tensor:
    """q [T, H, D] as [T, num_heads, D], with zeros for missing heads."""
    result = q.new_zeros((q.shape[0], num_heads, q.shape[2]))
    result[:, : q.shape[1]].copy_(q)
    return result


def _part(
    first_row: int,
    q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    starts: torch.Tensor,
    page_size: int,
) -> Part:
    qo_indptr = cu_seqlens(q_lens)
    return Part(
        rows=slice(first_row, first_row + int(qo_indptr[-1])),
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr(kv_lens, page_size=page_size),
        kv_lens=kv_lens,
        starts=starts,
    )


def _cut(
    q_lens: torch.Tensor, kv_lens: torch.Tensor, starts: torch.Tensor, num_heads: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The lists, cut so that each stretch has at most `PLAN_TILES`."""
    held: list[tuple[int, int, int]] = []
    room = PLAN_TILES
    for q_len, kv_len, start in zip(
        q_lens.tolist(), kv_lens.tolist(), starts.tolist(), strict=True
    ):
        done = 0
        while done < q_len:
            rows = min(q_len - done, (room - 2) * TILE // num_heads)
            if rows < 1:
                yield _columns(held)
                held, room = [], PLAN_TILES
                continue
            done += rows
            held.append((rows, kv_len - q_len + done, start))
            room -= 2 - (-rows * num_heads // TILE)
    yield _columns(held)


def _columns(rows: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first, second, third = torch.tensor(rows, dtype=torch.int32).unbind(1)
    return first, second, third


def _check_served(batch: ForwardBatch) -> None:
    batch.check_unmasked()
    if batch.topk_indices is not None:
        raise InvalidInput("topk_indices", got="picked keys", expected="None: each is attended to")
