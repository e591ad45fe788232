"""The batch of a step: lengths, positions, draft trees, scored items and an indexer's picks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attnmux.core import ForwardBatch, MultiItem, SpecInput
from attnmux.testing.cases.case import Step
from attnmux.testing.setup.case import CaseSetup
from attnmux.testing.setup.placement import Placed

UNREAD_ITEM_POSITION = 9999
"""The value for tokens of a shared prefix, which a backend must not read."""
UNWRITTEN = 1 << 30
"""The batch's picks before the first layer's indexer writes them: no key of any request."""


def make_batch(
    setup: CaseSetup, step: Step, requests: list[Placed], host_lens: bool
) -> ForwardBatch:
    """The batch of placed requests; with `host_lens` it has its host mirrors."""
    device = setup.context.device

    def lengths(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    is_extend = step.mode.is_extend()
    is_verify = step.mode.is_target_verify()
    new = lengths([request.new for request in requests])
    cached = lengths([request.cached for request in requests])
    seq_lens = cached.clone() if is_verify else cached + new
    spec_info, depths = _speculate(setup, requests) if is_verify else (None, None)
    trailing = torch.zeros(step.trailing, dtype=torch.int64, device=device)
    out_cache_loc = torch.cat([request.new_slots for request in requests] + [trailing])
    has_encoder = bool(step.encoder)
    return ForwardBatch(
        forward_mode=step.mode,
        batch_size=len(requests),
        req_pool_indices=torch.tensor(
            [request.row for request in requests], dtype=torch.int64, device=device
        ),
        seq_lens=seq_lens,
        out_cache_loc=out_cache_loc,
        positions=torch.cat([_positions(requests, depths, device), trailing]),
        seq_lens_cpu=seq_lens.cpu() if host_lens else None,
        seq_lens_sum=int(seq_lens.sum()) if host_lens else None,
        extend_seq_lens=new if is_extend else None,
        extend_seq_lens_cpu=new.cpu() if is_extend and host_lens else None,
        extend_prefix_lens=cached if is_extend else None,
        extend_prefix_lens_cpu=cached.cpu() if is_extend and host_lens else None,
        extend_num_tokens=len(out_cache_loc) if is_extend else None,
        encoder_lens=lengths([request.encoder for request in requests]) if has_encoder else None,
        encoder_out_cache_loc=torch.cat(
            [request.encoder_slots for request in requests if request.new_encoder]
            or [out_cache_loc[:0]]
        )
        if has_encoder
        else None,
        topk_indices=_unwritten_topk(setup, len(out_cache_loc)),
        spec_info=spec_info,
        multi_item=_multi_item(step, device) if step.items else None,
    )


def _positions(
    requests: list[Placed], depths: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """A token's place in its sequence; a draft token comes right after its ancestors."""
    parts = [torch.zeros(0, dtype=torch.int64, device=device)]
    for index, request in enumerate(requests):
        order = torch.arange(request.new, device=device) if depths is None else depths[index]
        parts.append((request.cached + order).clamp(min=0))
    return torch.cat(parts)


def _speculate(setup: CaseSetup, requests: list[Placed]) -> tuple[SpecInput, torch.Tensor | None]:
    """The step's SpecInput and, for trees, the depth of each draft token, [B, d]."""
    case, device = setup.case, setup.context.device
    num_draft_tokens = requests[0].new
    if not case.has_trees:
        return SpecInput(draft_token_num=num_draft_tokens), None
    parents = torch.full((len(requests), num_draft_tokens), -1)
    depths = torch.zeros_like(parents)
    visible = torch.eye(num_draft_tokens, dtype=torch.bool).repeat(len(requests), 1, 1)
    for token in range(1, num_draft_tokens):
        parents[:, token] = torch.randint(token, (len(requests),), generator=setup.generator)
        visible[:, token] |= visible[torch.arange(len(requests)), parents[:, token]]
        depths[:, token] = depths.gather(1, parents[:, token : token + 1]).squeeze(1) + 1
    spec_info = SpecInput(draft_token_num=num_draft_tokens, topk=case.spec_topk or 1)
    if case.tree_mask != "full":
        visible = visible.to(device)
        if case.tree_mask == "qlen_only":
            return replace(spec_info, visible=visible), depths.to(device)
        return replace(spec_info, visible_bits=_packed(visible)), depths.to(device)
    widths = torch.tensor([num_draft_tokens * request.length for request in requests])
    masks = [
        torch.nn.functional.pad(seen, (request.cached, 0), value=True).flatten()
        for request, seen in zip(requests, visible, strict=True)
    ]
    spec_info = replace(
        spec_info,
        custom_mask=torch.cat(masks).to(device),
        mask_indptr=torch.nn.functional.pad(widths.cumsum(0), (1, 0)).int().to(device),
    )
    return spec_info, depths.to(device)


def _packed(visible: torch.Tensor) -> torch.Tensor:
    """`SpecInput.visible_bits` from `SpecInput.visible`."""
    size, drafts, _ = visible.shape
    octets = torch.nn.functional.pad(visible, (0, -drafts % 8)).view(size, drafts, -1, 8)
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=octets.device)
    return torch.sum(octets * weights, -1, dtype=torch.uint8)


def _multi_item(step: Step, device: torch.device) -> MultiItem:
    prefixes = [length - sum(items) for length, items in zip(step.lens, step.items, strict=True)]
    in_items: list[int] = []
    for prefix, items, length, new in zip(prefixes, step.items, step.lens, step.new, strict=True):
        places = [place for item in items for place in range(item)]
        whole = [UNREAD_ITEM_POSITION] * prefix + places
        in_items += whole[length - new :]
    return MultiItem(
        prefix_lens=torch.tensor(prefixes, dtype=torch.int32, device=device),
        token_pos_in_items=torch.tensor(in_items, dtype=torch.int32, device=device),
    )


def _unwritten_topk(setup: CaseSetup, num_tokens: int) -> torch.Tensor | None:
    """The batch's topk_indices before the first layer; None without an indexer."""
    topk = setup.case.index_topk
    if not topk:
        return None
    shape = (num_tokens, topk)
    return torch.full(shape, UNWRITTEN, dtype=torch.int32, device=setup.context.device)


def pick_topk(
    setup: CaseSetup, requests: Sequence[Placed], batch: ForwardBatch, *, in_front: bool
) -> torch.Tensor:
    """[T, topk] int32: random keys up to each token, as many as fit, out of order.

    Every fifth token gets one key less than it could have. in_front: the -1 follow the keys, else
    they are between them. Rows of no request are -1.
    """
    topk = setup.case.index_topk
    picks = torch.full((batch.num_tokens, topk), -1, dtype=torch.int32)
    token = 0
    for request in requests:
        # Keys that come with the call are all keys
        cached = request.cached if setup.case.save_kv_cache else 0
        for order in range(request.new):
            num_keys = cached + order + 1
            count = min(num_keys, topk)
            if token % 5 == 4 and count > 1:
                count -= 1
            keys = torch.randperm(num_keys, generator=setup.generator)[:count].int()
            columns = torch.arange(count)
            if not in_front:
                columns = torch.randperm(topk, generator=setup.generator)[:count]
            picks[token, columns] = keys
            token += 1
    return picks.to(setup.context.device)
