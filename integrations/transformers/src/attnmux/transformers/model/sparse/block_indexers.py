"""Modules of a model that pick blocks of keys, for each token and group of heads of a layer.

MiniMax-M3 has such indexers in some layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnmux.transformers.model.sparse.block_ranking import BestProducts
from attnmux.transformers.model.sparse.index_shape import IndexShape
from attnmux.transformers.model.sparse.indexer_trial import (
    PICKED,
    TOLERANCE,
    TRIED_TOKENS,
    is_built_of,
    rotary_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = {"q_proj", "k_proj", "q_norm", "k_norm"}
NUMBERS = ("num_heads", "head_dim", "block_size", "topk_blocks", "local_blocks", "layer_idx")

TRIED_BLOCK, TRIED_TOPK = 3, 4
"""While an indexer is compared with ours: few tokens have many blocks then."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockIndexer:
    """One module that picks the blocks of its layer."""

    module: Any
    owner: torch.nn.Module
    """The attention module that calls it."""
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """(q, k, cos, sin): the one that the module's forward calls."""

    @property
    def shape(self) -> IndexShape:
        module = self.module
        return IndexShape(
            topk=module.topk_blocks,
            head_dim=module.head_dim,
            block_size=module.block_size,
            heads=module.num_heads,
        )

    @property
    def answer(self) -> bool:
        return PICKED

    @property
    def ranking(self) -> BestProducts:
        return BestProducts(local_blocks=self.module.local_blocks)

    def project(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(index_q [T, Hi, Di], index_k [T, Di]) of tokens in one row.

        hidden_states: [1, T, hidden]. position_embeddings: cos and sin.
        """
        module, dim = self.module, self.module.head_dim
        q, k = (
            norm(projection(hidden_states).unflatten(-1, (-1, dim))).transpose(1, 2)
            for projection, norm in (
                (module.q_proj, module.q_norm),
                (module.k_proj, module.k_norm),
            )
        )
        q, k = self.rotary(
            q, k, *(position_embedding[..., :dim] for position_embedding in position_embeddings)
        )
        return q[0].transpose(0, 1), k[0, 0]

    def agrees(self) -> bool:
        """Whether the module's own forward picks the blocks of random tokens by our scores."""
        module, count = self.module, TRIED_TOKENS
        weight = module.k_proj.weight
        draw = torch.Generator(device="cpu").manual_seed(0)
        hidden = torch.randn(1, count, weight.shape[1], generator=draw).to(weight)
        # The model's rotary part may be narrower than a head
        angles = torch.randn(1, count, module.head_dim // 2, generator=draw).to(weight)
        turns = angles.repeat(1, 1, 2).cos(), angles.repeat(1, 1, 2).sin()
        places = torch.arange(count, device=weight.device)
        with _small_blocks(module):
            try:
                scored = type(module).forward(module, hidden, turns, None, places.unsqueeze(0))[0]
            except Exception:  # its forward takes something else: another version of the model
                return False
        q, k = (tensor.float() for tensor in self.project(hidden, turns))
        scores = self.ranking.scores(q[None], k[None], places[None], TRIED_BLOCK)
        ours = self.ranking.picks(scores, places[None], TRIED_BLOCK, TRIED_TOPK)[0]
        scored = scored.transpose(0, 1)
        if scored.shape != ours.shape or not bool(((scored < 0) == (ours < 0)).all()):
            return False
        largest = scores[scores.isfinite()].abs().max()
        worst, expected = (_worst(scores[0], picks) for picks in (scored, ours))
        return bool((expected - worst <= TOLERANCE * largest).all())


def _worst(scores: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
    """The lowest score of what is picked. scores: [T, H, blocks]. picks: [T, H, topk]."""
    scored = scores.gather(-1, picks.clamp(min=0).long())
    return scored.masked_fill(picks < 0, torch.inf).amin(-1)


@contextmanager
def _small_blocks(module: Any) -> Iterator[None]:  # noqa: ANN401  # a module with these numbers
    kept = module.block_size, module.topk_blocks
    module.block_size, module.topk_blocks = TRIED_BLOCK, TRIED_TOPK
    try:
        yield
    finally:
        module.block_size, module.topk_blocks = kept


def has_block_parts(module: torch.nn.Module) -> bool:
    """Whether the module is built as an indexer of blocks."""
    return is_built_of(module, PARTS, NUMBERS)


@torch.no_grad()
def block_indexer(module: torch.nn.Module, owner: torch.nn.Module) -> BlockIndexer | None:
    """The module as an indexer whose picks are its own; None if it is none of ours."""
    if not has_block_parts(module):
        return None
    rotary = rotary_of(module)
    if rotary is None:
        return None
    indexer = BlockIndexer(module=module, owner=owner, rotary=rotary)
    return indexer if indexer.agrees() else None
