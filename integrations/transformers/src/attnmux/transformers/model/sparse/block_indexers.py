"""Modules of a model that pick blocks of keys: by products of keys for each token and group of
heads of a layer, as MiniMax-M3's, or by the mean of a block's rows, as Qwen4-Exp's."""

from __future__ import annotations

from types import MappingProxyType

import torch

from attnmux.transformers.model.sparse.model_indexer import (
    TOLERANCE,
    TRIED_BLOCK,
    TRIED_TOPK,
    IndexShape,
    ModelIndexer,
)
from attnmux.transformers.model.sparse.ranking import BestProducts, KeysOfBlocks


class BlockIndexer(ModelIndexer):
    """A module that picks blocks for each token and group of heads."""

    PARTS = frozenset({"q_proj", "k_proj", "q_norm", "k_norm"})
    NUMBERS = ("num_heads", "head_dim", "block_size", "topk_blocks", "local_blocks", "layer_idx")
    PROJECTION = "k_proj"
    TRIED = MappingProxyType({"block_size": TRIED_BLOCK, "topk_blocks": TRIED_TOPK})

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
        # The model's rotary part may be narrower than a head
        draw = torch.Generator().manual_seed(0)
        hidden, turns, places = self.tokens(self.module.head_dim // 2 * 2, draw)
        own = self.own_result(hidden, turns, None, places.unsqueeze(0))
        if own is None:
            return False
        q, k = (tensor.float() for tensor in self.project(hidden, turns))
        scores = self.ranking.scores(q[None], k[None], places[None], TRIED_BLOCK)
        ours = self.ranking.picks(scores, places[None], TRIED_BLOCK, TRIED_TOPK)[0]
        theirs = own.transpose(0, 1)
        if theirs.shape != ours.shape or not bool(((theirs < 0) == (ours < 0)).all()):
            return False
        largest = scores[scores.isfinite()].abs().max()
        worst, expected = (_worst(scores[0], picks) for picks in (theirs, ours))
        return bool((expected - worst <= TOLERANCE * largest).all())


def _worst(scores: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
    """The lowest score of what is picked. scores: [T, H, blocks]. picks: [T, H, topk]."""
    scored = scores.gather(-1, picks.clamp(min=0).long())
    return scored.masked_fill(picks < 0, torch.inf).amin(-1)


class MeanIndexer(ModelIndexer):
    """A module that picks blocks by one key for each.

    A block's key is the mean of its tokens' keys, normed, and rotated to the place of its first
    token. So a token's row in the pool is its key, followed by the halves of cos and sin at its
    place that are not repeated.
    """

    PARTS = frozenset({"index_qk_proj", "q_layernorm", "k_layernorm"})
    NUMBERS = ("index_n_heads", "index_head_dim", "block_topk", "compress_ratio", "layer_idx")
    PROJECTION = "index_qk_proj"
    TRIED = MappingProxyType(
        {
            "compress_ratio": TRIED_BLOCK,
            "block_topk": TRIED_TOPK,
            "token_budget": TRIED_BLOCK * TRIED_TOPK,
        }
    )

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
        turned: torch.Tensor = self.rotary(k.unsqueeze(1), cos=cos, sin=sin, unsqueeze_dim=1)
        return turned.squeeze(1).view(*rows.shape[:-2], dim)

    @property
    def ranking(self) -> KeysOfBlocks:
        return KeysOfBlocks(make=self.keys)

    def agrees(self) -> bool:
        draw = torch.Generator().manual_seed(0)
        rotary_dim = 2 * max(1, self.module.index_head_dim // 4)
        hidden, turns, places = self.tokens(rotary_dim, draw)
        causal = places <= places.unsqueeze(1)
        own = self.own_result(hidden, turns, causal[None, None], None)
        if own is None or own[0].shape != causal.shape:
            return False
        q, rows = (tensor[None].float() for tensor in self.project(hidden, turns))
        scores = self.ranking.scores(q, rows, places[None], TRIED_BLOCK)
        ours = self.ranking.picks(scores, places[None], TRIED_BLOCK, TRIED_TOPK + 1)[0, :, 0]
        in_block = (ours.unsqueeze(-1) == places // TRIED_BLOCK).any(1)
        theirs, seen = own[0], in_block & causal
        if not bool((theirs.sum(-1) == seen.sum(-1)).all()):
            return False
        scores = scores[0, :, 0]
        largest = scores[scores.isfinite()].max()
        worst, expected = (
            scores.masked_fill(~mask[:, ::TRIED_BLOCK] | scores.isneginf(), torch.inf).amin(-1)
            for mask in (theirs, seen)
        )
        return not bool((expected - worst > TOLERANCE * largest).any())
