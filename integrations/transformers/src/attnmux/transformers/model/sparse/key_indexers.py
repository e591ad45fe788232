"""Sparse latent attention: modules of a model that pick the keys of each layer.

DeepSeek-V3.2 has such an indexer in its layers, and a backend of kind "nsa" reads its picks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnmux.transformers.model.sparse.model_indexer import (
    TOLERANCE,
    IndexShape,
    ModelIndexer,
    forward_of,
    rotary_of,
)
from attnmux.transformers.model.sparse.ranking import index_scores

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyIndexer(ModelIndexer):
    """One module that picks the keys of its layer."""

    PARTS = frozenset({"wq_b", "wk", "k_norm", "weights_proj"})
    NUMBERS = ("n_heads", "head_dim", "index_topk", "qk_rope_head_dim", "layer_idx")
    PROJECTION = "wk"

    turns_first: bool
    """Whether the rotary values of a head are its first ones, or its last."""

    @classmethod
    def is_built(cls, module: Any) -> bool:  # noqa: ANN401  # a torch module
        if not super().is_built(module):
            return False
        code = forward_of(module).__code__
        takes = code.co_varnames[: code.co_argcount]
        return "q_resid" in takes and rotary_of(module) is not None

    @classmethod
    def ways(cls, **fields: Any) -> list[Self]:  # noqa: ANN401  # of this class
        return [cls(**fields, turns_first=first) for first in (True, False)]

    @property
    def shape(self) -> IndexShape:
        return IndexShape(topk=self.module.index_topk, head_dim=self.module.head_dim)

    def project(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *_: object,
        **__: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(index_q [T, Hi, Di], index_k [T, Di], weights [T, Hi]) of tokens in one row.

        hidden_states: [1, T, hidden]. q_resid: [1, T, rank of Q]. position_embeddings: cos and sin.
        """
        module = self.module
        q = module.wq_b(q_resid).unflatten(-1, (module.n_heads, module.head_dim))
        k = module.k_norm(module.wk(hidden_states)).unsqueeze(2)
        rope = module.qk_rope_head_dim
        if self.turns_first:
            turned, kept = slice(None, rope), slice(rope, None)
        else:
            kept, turned = slice(None, -rope), slice(-rope, None)
        turns = self.rotary(q[..., turned], k[..., turned], *position_embeddings, unsqueeze_dim=2)
        order = 1 if self.turns_first else -1
        q, k = (
            torch.cat([part, rows[..., kept]][::order], dim=-1)[0]
            for part, rows in zip(turns, (q, k), strict=True)
        )
        weights = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype))[0]
        scale = (module.n_heads * module.head_dim) ** -0.5
        return q, k.squeeze(1), weights.float() * scale

    def agrees(self) -> bool:
        draw = torch.Generator().manual_seed(0)
        hidden, turns, places = self.tokens(self.module.qk_rope_head_dim, draw)
        q_resid = self.drawn(1, len(places), self.module.wq_b.in_features, draw=draw)
        every = torch.ones(1, len(places), len(places), dtype=torch.bool, device=places.device)
        ranked = self.own_result(hidden, q_resid, turns, every, places.unsqueeze(0))
        if ranked is None:
            return False
        scores = index_scores(*self.project(hidden, q_resid, turns)).gather(1, ranked.long())
        return bool((scores.diff(dim=1) <= TOLERANCE * scores.abs().max()).all())
