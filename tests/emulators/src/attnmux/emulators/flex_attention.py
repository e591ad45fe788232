"""The kernel in plain torch operations: what a spec computes, with nothing compiled.

It gives an LSE and can be recorded in a graph on any device, which the C++ kernel cannot, and costs
as much as attention over the whole pool, or over the tiles' lists if all of them are shorter. A
block that a tile lists is loaded whole: a NaN in it shows.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnmux.cpu import Kernel, KernelInput, KernelSpec, Result


def emulated(spec: KernelSpec) -> Kernel:
    """In place of `attnmux.cpu.flex_attention.kernel.kernel`."""
    return functools.partial(_attend, spec)


def _attend(
    spec: KernelSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    numbers: torch.Tensor,
    given: KernelInput,
) -> Result:
    lists = [(given.num_partial, given.partial)]
    if given.num_whole is not None and given.whole is not None:
        lists.append((given.num_whole, given.whole))
    if spec.num_tiles * len(lists) * spec.listed * spec.block < k.shape[2]:
        keys, loaded, whole = _listed_keys(lists, spec)
        k, v = (cache[0][:, keys].transpose(0, 1) for cache in (k, v))
    else:
        keys = torch.arange(k.shape[2], device=k.device).unsqueeze(0)
        partial, *rest = (_listed(*each, spec)[:, keys[0] // spec.block] for each in lists)
        whole = rest[0] if rest else torch.zeros_like(partial)
        loaded = partial | whole
    # [N, tile_size, S], then a copy for each head of a group.
    seen = loaded.unsqueeze(1) & (whole.unsqueeze(1) | _sees(given, keys, spec))
    hidden = ~seen.repeat(1, spec.group, 1).unsqueeze(1)
    # In place: the logits of every tile and key of the pool are most of the memory that is moved
    logits = (q.float() @ k.nan_to_num().float().transpose(2, 3)).mul_(numbers[0])
    if spec.capped:
        logits.div_(numbers[1]).tanh_().mul_(numbers[1])
    if spec.num_biases:
        logits += _bias(numbers[2:], given, keys, spec)
    lse = logits.masked_fill_(hidden, -torch.inf).logsumexp(-1)
    weights = logits.sub_(lse.unsqueeze(-1)).masked_fill_(hidden, -torch.inf).exp_()
    out = weights @ v.nan_to_num().float()
    is_poisoned = k.isnan().any(-1) | v.isnan().any(-1)
    poison = (loaded.unsqueeze(1) & is_poisoned).any(-1)[..., None, None]
    out = torch.where(poison, torch.nan, out).to(q.dtype)
    return out, lse if spec.lse else None


def _listed_keys(
    lists: Sequence[tuple[torch.Tensor, torch.Tensor]], spec: KernelSpec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[N, S], each: the keys at all places of a tile's lists, whether a place is used, and whether
    its block needs no mask."""
    places = torch.arange(spec.listed, device=spec.device)
    used = torch.cat([places < count.view(-1, 1) for count, _ in lists], 1)
    blocks = torch.cat([blocks[:, 0, 0, : spec.listed] for _, blocks in lists], 1)
    starts = blocks.where(used, 0).long().unsqueeze(-1) * spec.block
    keys = (starts + torch.arange(spec.block, device=spec.device)).flatten(1)
    whole = torch.arange(keys.shape[1], device=spec.device) >= spec.listed * spec.block
    return keys, used.repeat_interleave(spec.block, 1), whole.expand(keys.shape)


def _listed(count: torch.Tensor, blocks: torch.Tensor, spec: KernelSpec) -> torch.Tensor:
    """[N, capacity] bool: the blocks that each tile lists."""
    own = blocks[:, 0, 0, : spec.listed].long()
    is_listed = torch.arange(spec.listed, device=own.device) < count.view(-1, 1)
    # What lies behind a list's end may be anything: it goes to the place that is nobody's.
    places = torch.where(is_listed, own, spec.capacity - 1)
    found = torch.zeros((spec.num_tiles, spec.capacity), dtype=torch.bool, device=own.device)
    return found.scatter(1, places, is_listed)


def _bias(
    biases: torch.Tensor, given: KernelInput, keys: torch.Tensor, spec: KernelSpec
) -> torch.Tensor:
    """[N, Hkv, rows, S]: ALiBi's, for slopes [Hq], or those of a table, [Hq * columns]."""
    column = (given.columns[keys // spec.block] + keys % spec.block).unsqueeze(1)
    # A query's own column is its last, unless it is given
    own = given.end - 1 if given.place is None else given.place
    distance = column - own.unsqueeze(-1)
    if spec.biased:
        of_rows = biases.view(spec.num_kv_heads, -1).repeat_interleave(spec.tile_size, dim=1)
        return of_rows.unsqueeze(-1) * distance.repeat(1, spec.group, 1).unsqueeze(1)
    table = biases.view(spec.num_kv_heads, spec.group, spec.relative)
    columns = distance.clamp(-spec.reach, spec.relative - 1 - spec.reach) + spec.reach
    return table[:, :, columns].permute(2, 0, 1, 3, 4).flatten(2, 3)


def _sees(given: KernelInput, keys: torch.Tensor, spec: KernelSpec) -> torch.Tensor:
    """[N, tile_size, S] bool."""
    column = (given.columns[keys // spec.block] + keys % spec.block).unsqueeze(1)
    seen = (column >= given.first.unsqueeze(-1)) & (column < given.end.unsqueeze(-1))
    if given.hidden is not None:
        prefix_end, item_start = (part.unsqueeze(-1) for part in given.hidden)
        seen = seen & ~((column >= prefix_end) & (column < item_start))
    if given.mask is not None:
        keep, rows, start = given.mask
        kept = keep[(rows.unsqueeze(-1) + column).clamp(0, spec.mask_room - 1)]
        seen = seen & (kept | (column < start.unsqueeze(-1)))
    return seen
