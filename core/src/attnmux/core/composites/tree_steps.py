"""Verify steps in two parts: what the prefixes and the drafts are asked, in which shapes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from attnmux.core.batch import ForwardBatch
from attnmux.core.tree_masks import visible_drafts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trees:
    """What a step that verifies trees asks of its two parts, apart from the pool."""

    lens: torch.Tensor
    """[B] int32: tokens of the prefix, but at least 1."""
    positions: torch.Tensor
    """[B] int64: of the prefix's last token."""
    sees_prefix: torch.Tensor
    """[B] bool: whether the prefix has a token."""
    visible: torch.Tensor
    """[B, d, d] bool: the drafts that each draft sees."""

    @classmethod
    def blank(cls, batch_size: int, width: int, device: torch.device) -> Trees:
        """Of requests with a prefix of one token and `width` drafts that see all of each other."""
        return cls(
            lens=torch.ones(batch_size, dtype=torch.int32, device=device),
            positions=torch.zeros(batch_size, dtype=torch.int64, device=device),
            sees_prefix=torch.ones(batch_size, dtype=torch.bool, device=device),
            visible=torch.ones(batch_size, width, width, dtype=torch.bool, device=device),
        )

    def fits(self, other: Trees) -> bool:
        """Whether there is room for a copy of `other`."""
        enough = other.visible.numel() <= self.visible.numel()
        return len(other.lens) <= len(self.lens) and enough

    def copy(self, other: Trees) -> Trees:
        """A copy of `other`, in views of these tensors."""
        size, visible = len(other.lens), other.visible
        flat = self.visible.view(-1)[: visible.numel()]
        return Trees(
            lens=self.lens[:size].copy_(other.lens),
            positions=self.positions[:size].copy_(other.positions),
            sees_prefix=self.sees_prefix[:size].copy_(other.sees_prefix),
            visible=flat.view_as(visible).copy_(visible),
        )


def as_heads(q: torch.Tensor, groups: int, width: int, drafts: int) -> torch.Tensor:
    """[B * width, Hq, D] to [B, drafts * Hq, D], the heads of one KV head together; absent drafts
    have zeros."""
    q = q.reshape(-1, width, groups, q.shape[1] // groups, q.shape[2])
    if width < drafts:
        q = pad(q, (0, 0, 0, 0, 0, 0, 0, drafts - width))
    return q.transpose(1, 2).reshape(q.shape[0], -1, q.shape[-1])


def as_tokens(values: torch.Tensor, groups: int, width: int, drafts: int) -> torch.Tensor:
    """The inverse of `as_heads`, of [B, drafts * Hq] or [B, drafts * Hq, Dv]."""
    size, heads = values.shape[:2]
    by_draft = values.view(size, groups, drafts, heads // groups // drafts, *values.shape[2:])
    by_draft = by_draft[:, :, :width].transpose(1, 2)
    return by_draft.reshape(size * width, heads // drafts, *values.shape[2:])


def sinks_as_heads(sinks: torch.Tensor, groups: int, drafts: int) -> torch.Tensor:
    """The sinks [Hq] of each of `drafts` tokens, [drafts * Hq] in the order of `as_heads`."""
    by_group = sinks.view(groups, 1, -1)
    return by_group.expand(-1, drafts, -1).reshape(-1)


def trees_of(batch: ForwardBatch) -> Trees:
    """Those of a TARGET_VERIFY step.

    An empty prefix gets a token, because each request of a decode step has one. Its share of the
    answer is dropped. Raises InvalidInput for a step without drafts.
    """
    lens = batch.seq_lens.clamp(min=1)
    return Trees(
        lens=lens,
        positions=lens.long() - 1,
        sees_prefix=batch.seq_lens > 0,
        visible=visible_drafts(batch),
    )
