"""Attention of one tile, whose keys are gathered block by block.

The query heads that share a KV head are rows of one matrix, [R * Hkv, G * Tq, D] against
[R * Hkv, S, D], so K and V are gathered once and never repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnmux.core import KVPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnmux.core import LayerSpec, Workspace
    from attnmux.cpu.spans import Visibility
    from attnmux.cpu.torch_native.plan import Tile


_NO_LOGIT = torch.finfo(torch.float32).min
"""The maximum of no logits. It is finite, since -inf - -inf is NaN."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Operands:
    """One layer's tensors in a step."""

    layer: LayerSpec
    q: torch.Tensor
    """[T, Hq, D], for MLA the latent part."""
    q_rope: torch.Tensor | None
    keys: torch.Tensor
    """[slots * Hkv, D]: a row for each head of each slot."""
    values: torch.Tensor | None
    """[slots * Hkv, Dv]; None for MLA, where V is the front of K."""
    scales: tuple[float, float]
    """The factors of K and V."""
    dtype: torch.dtype
    """The dtype that matrices are multiplied in."""
    widening: Widening | None
    """Converts 8-bit K and V to `dtype`; None for other dtypes."""
    block_scales: tuple[torch.Tensor, torch.Tensor] | None
    """Scales of K and V in 4-bit floats, see `KVPool.get_scale_buffers`."""
    workspace: Workspace

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory, shared by all tiles and layers."""
        return self.workspace.tensor(f"torch_native.{name}", shape, dtype)

    def fold(self, tile: Tile, per_head: torch.Tensor) -> torch.Tensor:
        """A tile's [R * Tq, Hq, n] as [R, Hkv, G, Tq, n], a view."""
        num_kv_heads = self.layer.tp_k_head_num
        folded = per_head.view(
            tile.num_requests,
            -1,
            num_kv_heads,
            per_head.shape[1] // num_kv_heads,
            per_head.shape[2],
        )
        return folded.permute(0, 2, 3, 1, 4)

    def unfold(self, tile: Tile, folded: torch.Tensor) -> torch.Tensor:
        """A tile's [R * Hkv, G * Tq, n] as [R * Tq, Hq, n]."""
        layer = self.layer
        group = layer.tp_q_head_num // layer.tp_k_head_num
        width = folded.shape[-1]
        per_head = folded.view(tile.num_requests, layer.tp_k_head_num, group, -1, width)
        return per_head.permute(0, 3, 1, 2, 4).reshape(-1, layer.tp_q_head_num, width)


def attend(
    operands: Operands, tile: Tile, visibility: Visibility
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tile's out [R * Tq, Hq, Dv] and LSE [R * Tq, Hq], float32, in the order of its tokens."""
    queries = _queries(operands, tile)
    softmax = _OnlineSoftmax(operands, tile, queries.shape[:2])
    for start in range(0, tile.slots.shape[1], tile.step):
        slots = tile.slots[:, start : start + tile.step]
        rows = _rows(operands, slots)
        keys = _gather(operands, operands.keys, rows, 0)
        logits = _logits(operands, queries, keys)
        _add_bias(logits, operands.layer, tile, visibility, start)
        _hide(logits, tile, visibility, start)
        weights = softmax.weigh(logits)
        if operands.values is None:
            values = keys[..., : operands.layer.v_head_dim]
        else:
            values = _gather(operands, operands.values, rows, 1)
        softmax.add(weights, values)
    return operands.unfold(tile, softmax.out()), operands.unfold(tile, softmax.lse()).squeeze(-1)


def _queries(operands: Operands, tile: Tile) -> torch.Tensor:
    """[R * Hkv, G * Tq, D] in the product's dtype; for MLA the rotary part follows the latent."""
    latent = operands.fold(tile, operands.q[tile.tokens])
    width = operands.layer.qk_head_dim
    queries = operands.scratch("queries", (*latent.shape[:-1], width), operands.dtype)
    queries[..., : latent.shape[-1]].copy_(latent)
    if operands.q_rope is not None:
        queries[..., latent.shape[-1] :].copy_(operands.fold(tile, operands.q_rope[tile.tokens]))
    num_requests, num_kv_heads, group, num_queries, _ = latent.shape
    return queries.view(num_requests * num_kv_heads, group * num_queries, width)


def _rows(operands: Operands, slots: torch.Tensor) -> torch.Tensor:
    """[R, Hkv, S] int64: rows of the flat K and V, slot * Hkv + head.

    Gathering by head rather than by token makes each head's keys one matrix, and a CPU core gathers
    the heads that it multiplies afterwards.
    """
    num_heads = operands.layer.tp_k_head_num
    heads = torch.arange(num_heads, device=slots.device).unsqueeze(1)
    rows = operands.scratch("rows", (slots.shape[0], num_heads, slots.shape[1]), torch.int64)
    return torch.add(heads, slots.unsqueeze(1), alpha=num_heads, out=rows)


def _gather(
    operands: Operands, source: torch.Tensor, rows: torch.Tensor, part: int
) -> torch.Tensor:
    """[R * Hkv, S, width] in the product's dtype. part: 0 for K, 1 for V."""
    shape = (rows.shape[0] * rows.shape[1], rows.shape[2], source.shape[1])
    gathered = operands.scratch("gathered", shape, source.dtype)
    # torch does not gather 8-bit floats on every device.
    raw = torch.uint8 if source.itemsize == 1 else source.dtype
    into = gathered.view(-1, source.shape[1]).view(raw)
    torch.index_select(source.view(raw), 0, rows.view(-1), out=into)
    if operands.block_scales is not None:
        num_heads = operands.layer.tp_k_head_num
        scales = operands.block_scales[part]
        of_rows = scales.view(torch.uint8)[rows // num_heads, rows % num_heads]
        of_rows = of_rows.view(scales.dtype).flatten(0, 1)
        return KVPool.unpack_rows(gathered, of_rows).to(operands.dtype)
    if source.dtype == operands.dtype:
        return gathered
    converted = operands.scratch("converted", shape, operands.dtype)
    if operands.widening is None:
        return converted.copy_(gathered)
    return operands.widening(gathered, converted, operands.scratch)


def _logits(operands: Operands, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[R * Hkv, G * Tq, S] float32, scaled and capped."""
    layer = operands.layer
    shape = (*queries.shape[:2], keys.shape[1])
    logits = operands.scratch("logits", shape, torch.float32)
    keys = keys.transpose(1, 2)
    if operands.dtype == torch.float32:
        torch.bmm(queries, keys, out=logits)
    else:
        # A product of 16-bit matrices is rounded to 16 bits, too coarse for an exponent. The second
        # product is the first one's rounding error.
        rounded = torch.bmm(queries, keys, out=operands.scratch("rounded", shape, operands.dtype))
        rest = operands.scratch("rest", shape, operands.dtype)
        torch.baddbmm(rounded, queries, keys, beta=-1, out=rest)
        logits.copy_(rounded).add_(rest)
    scaling = layer.scaling * operands.scales[0]
    if layer.logit_cap > 0:
        return logits.mul_(scaling / layer.logit_cap).tanh_().mul_(layer.logit_cap)
    return logits.mul_(scaling)


def _add_bias(
    logits: torch.Tensor, layer: LayerSpec, tile: Tile, visibility: Visibility, start: int
) -> None:
    """Add the layer's bias by distance, if any, in the block that begins at key `start`."""
    slopes, table = layer.alibi_slopes, layer.relative_bias
    if slopes is None and table is None:
        return
    num_keys = logits.shape[-1]
    keys = tile.first_key + torch.arange(start, start + num_keys, device=logits.device)
    distances = visibility.distances(tile.tokens, keys)
    by_head = logits.view(tile.num_requests, layer.tp_q_head_num, -1, num_keys)
    if slopes is not None:
        by_head.addcmul_(slopes.view(1, -1, 1, 1), distances.unsqueeze(1).float())
    if table is not None:
        reach = layer.relative_reach
        columns = distances.clamp_(-reach, table.shape[1] - 1 - reach).add_(reach)
        by_head.add_(table[:, columns].transpose(0, 1))


def _hide(logits: torch.Tensor, tile: Tile, visibility: Visibility, start: int) -> None:
    """Set the logits of hidden keys to -inf in the block that begins at key `start`."""
    stop = start + logits.shape[-1]
    seen_from, seen_to = tile.seen_by_all
    for left, right in ((start, min(seen_from, stop)), (max(seen_to, start), stop)):
        if left >= right:
            continue
        keys = tile.first_key + torch.arange(left, right, device=logits.device)
        hidden = visibility.hidden(tile.tokens, keys)
        by_query = logits.view(tile.num_requests, -1, hidden.shape[1], stop - start)
        by_query[..., left - start : right - start].masked_fill_(hidden.unsqueeze(1), -torch.inf)


class _OnlineSoftmax:
    """The softmax of a tile's queries over the keys added so far.

    A sink counts as a first key without a value.
    """

    def __init__(self, operands: Operands, tile: Tile, shape: torch.Size) -> None:
        self._operands = operands
        layer, device = operands.layer, operands.q.device
        if layer.sinks is None:
            self._max = torch.full((*shape, 1), _NO_LOGIT, dtype=torch.float32, device=device)
            self._sum = torch.zeros_like(self._max)
        else:
            group = layer.tp_q_head_num // layer.tp_k_head_num
            num_queries = shape[1] // group
            sinks = layer.sinks.float().view(layer.tp_k_head_num, group, 1)
            sinks = sinks.expand(tile.num_requests, -1, -1, num_queries)
            self._max = sinks.clone(memory_format=torch.contiguous_format).view(*shape, 1)
            self._sum = torch.ones_like(self._max)
        width = layer.v_head_dim
        self._out = operands.scratch("out", (*shape, width), torch.float32).zero_()
        self._of_block = operands.scratch("out_of_block", (*shape, width), operands.dtype)

    def weigh(self, logits: torch.Tensor) -> torch.Tensor:
        """The weights of a block's values, in the memory of its logits."""
        highest = torch.maximum(self._max, logits.amax(-1, keepdim=True))
        weights = logits.sub_(highest).exp_()
        decay = self._max.sub_(highest).exp_()
        self._sum.mul_(decay).add_(weights.sum(-1, keepdim=True))
        self._out.mul_(decay)
        self._max = highest
        if self._operands.dtype == torch.float32:
            return weights
        return self._operands.scratch("rounded", tuple(weights.shape), self._operands.dtype).copy_(
            weights
        )

    def add(self, weights: torch.Tensor, values: torch.Tensor) -> None:
        """Add a block's values, [R * Hkv, S, Dv]."""
        self._out.add_(torch.bmm(weights, values, out=self._of_block))

    def out(self) -> torch.Tensor:
        """[R * Hkv, G * Tq, Dv]."""
        scale = self._operands.scales[0 if self._operands.values is None else 1]
        self._out.div_(self._sum.clamp_min(torch.finfo(torch.float32).tiny))
        return self._out if scale == 1 else self._out.mul_(scale)

    def lse(self) -> torch.Tensor:
        """[R * Hkv, G * Tq, 1]; -inf for a query without keys."""
        return self._max + self._sum.log()


_WORD_OF_TWO = {2: torch.int32, 4: torch.int64}
"""An integer dtype as large as two values of so many bytes."""


class Widening:
    """Converts one 8-bit float dtype to a wider one, exactly.

    On a CPU torch converts value by value. There are only 65536 pairs of 8-bit values, so looking
    up pairs in a table is several times as fast.
    """

    def __init__(self, source: torch.dtype, target: torch.dtype, device: torch.device) -> None:
        """target: a dtype that represents every value of source."""
        self._word = _WORD_OF_TWO[target.itemsize]
        # Made on the host, where bytes and pairs are in the order that views of memory have.
        pairs = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(source)
        self._table = pairs.to(target).view(self._word).to(device)

    def __call__(
        self,
        values: torch.Tensor,
        out: torch.Tensor,
        scratch: Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor],
    ) -> torch.Tensor:
        """Write contiguous `values` to contiguous `out` of the same shape, and return `out`."""
        if values.numel() % 2 or values.device.type != "cpu":
            return out.copy_(values)
        pairs = values.view(-1).view(torch.uint16)
        places = scratch("pairs", (pairs.numel(),), torch.int32).copy_(pairs)
        torch.index_select(self._table, 0, places, out=out.view(-1).view(self._word))
        return out
