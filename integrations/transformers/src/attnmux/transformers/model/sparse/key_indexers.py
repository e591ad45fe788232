"""Sparse latent attention: modules of a model that pick the keys of each layer.

DeepSeek-V3.2 has such an indexer in its layers, and a backend of kind "nsa" reads its picks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.transformers.model.sparse.index_shape import IndexShape
from attnmux.transformers.model.sparse.indexer_trial import (
    PICKED,
    TOLERANCE,
    TRIED_TOKENS,
    forward_of,
    rotary_of,
)
from attnmux.transformers.model.sparse.scores import index_scores

PARTS = {"wq_b", "wk", "k_norm", "weights_proj"}
NUMBERS = ("n_heads", "head_dim", "index_topk", "qk_rope_head_dim", "layer_idx")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeyIndexer:
    """One module that picks the keys of its layer."""

    module: Any
    owner: torch.nn.Module
    """The attention module that calls it."""
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """(q, k, cos, sin, unsqueeze_dim): the one that the module's forward calls."""
    turns_first: bool = True
    """Whether the rotary values of a head are its first ones, or its last."""

    @property
    def shape(self) -> IndexShape:
        return IndexShape(topk=self.module.index_topk, head_dim=self.module.head_dim)

    @property
    def answer(self) -> bool:
        return PICKED

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
        """Whether the module's own forward ranks the keys of random tokens by our scores."""
        module, count = self.module, TRIED_TOKENS
        weight = module.wk.weight
        draw = torch.Generator(device="cpu").manual_seed(0)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw).to(weight)

        hidden, q_resid = drawn(1, count, weight.shape[1]), drawn(1, count, module.wq_b.in_features)
        angles = drawn(1, count, module.qk_rope_head_dim // 2).repeat(1, 1, 2)
        turns = angles.cos(), angles.sin()
        every = torch.ones(1, count, count, dtype=torch.bool, device=weight.device)
        places = torch.arange(count, device=weight.device).unsqueeze(0)
        try:
            ranked = type(module).forward(module, hidden, q_resid, turns, every, places)[0].long()
        except Exception:  # its forward takes something else: another version of the model
            return False
        scores = index_scores(*self.project(hidden, q_resid, turns)).gather(1, ranked)
        return bool((scores.diff(dim=1) <= TOLERANCE * scores.abs().max()).all())


def has_key_parts(module: torch.nn.Module) -> bool:
    """Whether the module is built as an indexer of keys."""
    return _rotary_of(module) is not None


@torch.no_grad()
def key_indexer(module: torch.nn.Module, owner: torch.nn.Module) -> KeyIndexer | None:
    """The module as an indexer whose ranking is its own; None if it is none of ours."""
    rotary = _rotary_of(module)
    if rotary is None:
        return None
    ways = (
        KeyIndexer(module=module, owner=owner, rotary=rotary, turns_first=first)
        for first in (True, False)
    )
    return next((indexer for indexer in ways if indexer.agrees()), None)


def _rotary_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The rotary function that an indexer's forward calls; None for any other module."""
    parts = {name for name, _ in module.named_children()}
    if not parts >= PARTS or not all(isinstance(getattr(module, name, 0), int) for name in NUMBERS):
        return None
    code = forward_of(module).__code__
    takes: Sequence[str] = code.co_varnames[: code.co_argcount]
    return rotary_of(module) if "q_resid" in takes else None
