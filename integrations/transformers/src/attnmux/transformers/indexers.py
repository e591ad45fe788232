"""Sparse latent attention: modules of a model that pick the keys of each layer.

DeepSeek-V3.2 has such an indexer in its layers. Its projections, norm and rotary function are the
model's; its keys go to a pool beside the latent's, and its picks to the batch, which a backend of
kind "nsa" reads. No model is recognised by its name: an indexer is a module with these parts whose
own forward ranks keys as ours does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import unwrap
from typing import Any

import torch

from attnmux.core import IndexKPool, InvalidInput, KeyPicker, current_forward_context
from attnmux.core.indices import index_scores
from attnmux.transformers.attention import UNMASKED

PICKED = False
"""What an indexer returns: its picks are on the batch. Not None, which layers that share the picks
of an earlier one take for missing, and no value for attention, which an indexer that nobody knows
would hand it."""

PARTS = {"wq_b", "wk", "k_norm", "weights_proj"}
NUMBERS = ("n_heads", "head_dim", "index_topk", "qk_rope_head_dim", "layer_idx")
ROTARY = "apply_rotary_pos_emb"
"""How the names of transformers' rotary functions begin."""

TRIED_TOKENS = 24
TOLERANCE = 0.02
"""The largest disorder of scores in the model's own ranking, as a share of the largest score: above
rounding in any dtype, and far below the effect of another rotary function or scale."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Indexer:
    """One module that picks the keys of its layer."""

    module: Any
    owner: torch.nn.Module
    """The attention module that calls it."""
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """(q, k, cos, sin, unsqueeze_dim): the one that the module's forward calls."""
    turns_first: bool = True
    """Whether the rotary values of a head are its first ones, or its last."""

    def project(
        self,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
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


@dataclass(kw_only=True, slots=True, eq=False)
class Indexers:
    """The indexers of a model."""

    each: tuple[Indexer, ...]
    topk: int
    head_dim: int
    picker: KeyPicker | None = None
    """While there is none, nothing is picked: as a probe runs, and where every key is seen."""
    is_captured: bool = field(default=True, init=False)
    """Whether steps have static shapes: any that do not run `eagerly`."""

    def bind(self) -> None:
        """Give the modules a forward that writes their picks to the batch of the running step."""
        for indexer in self.each:
            indexer.module.forward = self._bound(indexer)
            indexer.owner.register_forward_pre_hook(_unmasked, with_kwargs=True)

    def pool(self, *, num_slots: int, dtype: torch.dtype, device: torch.device) -> IndexKPool:
        """A pool for their keys. Raises PoolExhausted when memory does not suffice."""
        return IndexKPool(
            num_slots=num_slots,
            dtype=dtype,
            layer_ids=[indexer.module.layer_idx for indexer in self.each],
            head_dim=self.head_dim,
            device=device,
        )

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return IndexKPool.bytes_per_token(
            dtype=dtype, num_layers=len(self.each), head_dim=self.head_dim
        )

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Pick by the lengths on the host in the steps of the block."""
        self.is_captured = False
        try:
            yield
        finally:
            self.is_captured = True

    def _bound(self, indexer: Indexer) -> Callable[..., bool]:
        def forward(
            hidden_states: torch.Tensor,
            q_resid: torch.Tensor,
            position_embeddings: tuple[torch.Tensor, torch.Tensor],
            *_: object,
            **__: object,
        ) -> bool:
            if self.picker is not None:
                parts = indexer.project(hidden_states, q_resid, position_embeddings)
                batch = current_forward_context().batch
                layer_id = indexer.module.layer_idx
                self.picker.pick(layer_id, *parts, batch, captured=self.is_captured)
            return PICKED

        return forward


def bound_indexers(model: torch.nn.Module) -> Indexers | None:
    """The indexers of a model, bound; None without any, and where one is not known.

    A model with others is refused when its layers are recorded. Raises InvalidInput for indexers
    that differ from each other.
    """
    found = [
        _agreeing(child, owner, rotary)
        for owner in model.modules()
        for child in owner.children()
        if (rotary := _rotary_of(child)) is not None
    ]
    known = tuple(indexer for indexer in found if indexer is not None)
    if not found or len(known) < len(found):
        return None
    shapes = {(each.module.index_topk, each.module.head_dim) for each in known}
    if len(shapes) > 1:
        got = f"(index_topk, index_head_dim) of {sorted(shapes)}"
        raise InvalidInput("indexers", got=got, expected="the same in all layers")
    ((topk, head_dim),) = shapes
    indexers = Indexers(each=known, topk=topk, head_dim=head_dim)
    indexers.bind()
    return indexers


@torch.no_grad()
def _agreeing(
    module: torch.nn.Module, owner: torch.nn.Module, rotary: Callable[..., Any]
) -> Indexer | None:
    """The module as an indexer whose ranking is its own; None if it is none of ours."""
    ways = (
        Indexer(module=module, owner=owner, rotary=rotary, turns_first=first)
        for first in (True, False)
    )
    return next((indexer for indexer in ways if indexer.agrees()), None)


def _rotary_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The rotary function that an indexer's forward calls; None for any other module."""
    parts = {name for name, _ in module.named_children()}
    if not parts >= PARTS or not all(isinstance(getattr(module, each, 0), int) for each in NUMBERS):
        return None
    forward: Any = unwrap(type(module).forward)
    names = [name for name in forward.__code__.co_names if name.startswith(ROTARY)]
    takes: Sequence[str] = forward.__code__.co_varnames[: forward.__code__.co_argcount]
    if len(names) != 1 or "q_resid" not in takes:
        return None
    rotary: Callable[..., Any] | None = forward.__globals__.get(names[0])
    return rotary


def _unmasked(
    module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Hand a mask to a layer that gets none, and slices it for its indexer."""
    if kwargs.get("attention_mask") is None:
        kwargs = {**kwargs, "attention_mask": UNMASKED}
    return args, kwargs
