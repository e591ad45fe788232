"""Modules of a model that pick blocks of keys by the mean of their rows of each block's tokens.

Qwen4-Exp has such indexers in its attention layers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnmux.transformers.model.sparse.block_ranking import KeysOfBlocks
from attnmux.transformers.model.sparse.index_shape import IndexShape
from attnmux.transformers.model.sparse.indexer_trial import (
    TOLERANCE,
    TRIED_TOKENS,
    is_built_of,
    rotary_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PARTS = {"index_qk_proj", "q_layernorm", "k_layernorm"}
NUMBERS = ("index_n_heads", "index_head_dim", "block_topk", "compress_ratio", "layer_idx")

TRIED_BLOCK, TRIED_TOPK = 3, 4
"""While an indexer is compared with ours: few tokens have many blocks then."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeanIndexer:
    """One module that picks the blocks of its layer.

    A block's key is the mean of its tokens' keys, normed, and rotated to the place of its first
    token. So a token's row in the pool is its key, followed by the halves of cos and sin at its
    place that are not repeated.
    """

    module: Any
    owner: Any
    """The attention module that calls it."""
    rotary: Callable[..., torch.Tensor]
    """(q, cos, sin, unsqueeze_dim): the one that the module's forward calls."""

    @property
    def shape(self) -> IndexShape:
        module, config = self.module, self.owner.config
        turned = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
        return IndexShape(
            topk=module.block_topk,
            head_dim=module.index_head_dim + int(self.owner.head_dim * turned) // 2 * 2,
            block_size=module.compress_ratio,
            heads=config.num_key_value_heads,
            begun_block=True,
        )

    @property
    def answer(self) -> torch.Tensor:
        """The module's result: a mask that hides nothing."""
        device = self.module.index_qk_proj.weight.device
        return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)

    def project(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(index_q [T, Hi, Di], rows [T, Di + rotary dim]) of tokens in one row.

        hidden_states: [1, T, hidden]. position_embeddings: cos and sin.
        """
        module, (cos, sin) = self.module, position_embeddings
        heads = module.index_qk_proj(hidden_states).unflatten(-1, (-1, module.index_head_dim))
        q, k = heads[:, :, : module.index_n_heads], heads[0, :, -1]
        q = self.rotary(module.q_layernorm(q), cos=cos, sin=sin, unsqueeze_dim=2)
        half = cos.shape[-1] // 2
        return q[0], torch.cat([k, cos[0, :, :half].to(k), sin[0, :, :half].to(k)], dim=-1)

    def keys(self, rows: torch.Tensor) -> torch.Tensor:
        """Keys [..., Di] of blocks of rows [..., block, Di + rotary dim] float32."""
        module, dim = self.module, self.module.index_head_dim
        dtype = module.index_qk_proj.weight.dtype
        k = module.k_layernorm(rows[..., :dim].mean(-2).to(dtype)).flatten(0, -2)
        cos, sin = (
            half.flatten(0, -2).to(dtype).repeat(1, 2) for half in rows[..., 0, dim:].chunk(2, -1)
        )
        turned = self.rotary(k.unsqueeze(1), cos=cos, sin=sin, unsqueeze_dim=1)
        return turned.squeeze(1).view(*rows.shape[:-2], dim)

    @property
    def ranking(self) -> KeysOfBlocks:
        return KeysOfBlocks(make=self.keys)

    def agrees(self) -> bool:
        """Whether the module's own forward picks the blocks of random tokens by our scores."""
        module, count = self.module, TRIED_TOKENS
        weight = module.index_qk_proj.weight
        draw = torch.Generator(device="cpu").manual_seed(0)
        hidden = torch.randn(1, count, weight.shape[1], generator=draw).to(weight)
        angles = torch.randn(1, count, max(1, module.index_head_dim // 4), generator=draw)
        angles = angles.to(weight).repeat(1, 1, 2)
        turns = angles.cos(), angles.sin()
        places = torch.arange(count, device=weight.device)
        causal = (places <= places.unsqueeze(1)).view(1, 1, count, count)
        with _small_blocks(module):
            try:
                model_mask = type(module).forward(module, hidden, turns, causal, None)[0, 0]
            except Exception:  # its forward takes something else: another version of the model
                return False
        if model_mask.shape != (count, count):
            return False
        q, rows = self.project(hidden, turns)
        scores = self.ranking.scores(q[None].float(), rows[None].float(), places[None], TRIED_BLOCK)
        ours = self.ranking.picks(scores, places[None], TRIED_BLOCK, TRIED_TOPK + 1)[0, :, 0]
        seen = _tokens(ours, places)
        if not bool((model_mask.sum(-1) == seen.sum(-1)).all()):
            return False
        scores = scores[0, :, 0]
        largest = scores[scores.isfinite()].max()
        worst, expected = (
            scores.masked_fill(~mask[:, ::TRIED_BLOCK] | scores.isneginf(), torch.inf).amin(-1)
            for mask in (model_mask, seen)
        )
        return not bool((expected - worst > TOLERANCE * largest).any())


def _tokens(picks: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[T, T]: whether each token sees the others, by blocks [T, topk]."""
    in_block = (picks.unsqueeze(-1) == places // TRIED_BLOCK).any(1)
    return in_block & (places <= places.unsqueeze(1))


@contextmanager
def _small_blocks(module: Any) -> Iterator[None]:  # noqa: ANN401  # a module with these numbers
    small = {
        "compress_ratio": TRIED_BLOCK,
        "block_topk": TRIED_TOPK,
        "token_budget": TRIED_BLOCK * TRIED_TOPK,
    }
    kept = {name: getattr(module, name) for name in small}
    vars(module).update(small)
    try:
        yield
    finally:
        vars(module).update(kept)


def has_mean_parts(module: torch.nn.Module) -> bool:
    """Whether the module is built as an indexer of averaged blocks."""
    return is_built_of(module, PARTS, NUMBERS)


@torch.no_grad()
def mean_indexer(module: torch.nn.Module, owner: torch.nn.Module) -> MeanIndexer | None:
    """The module as an indexer whose picks are its own; None if it is none of ours."""
    if not has_mean_parts(module):
        return None
    rotary = rotary_of(module)
    if rotary is None:
        return None
    indexer = MeanIndexer(module=module, owner=owner, rotary=rotary)
    return indexer if indexer.agrees() else None
