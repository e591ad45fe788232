"""Sparse attention: modules of a model that pick the keys of each layer.

An indexer's projections, norms and rotary function are the model's; its keys go to a pool next to
the KV pool, and its picks to the batch. No model is recognised by its name: an indexer is a module
with the parts of one whose own forward picks as ours does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from attnmux.core import (
    BackendContext,
    Decision,
    ForwardBatch,
    ForwardContext,
    GraphConfig,
    InvalidInput,
    LayerSpec,
    Request,
    torch_dtype,
)
from attnmux.core.plugin import shared_kernel
from attnmux.transformers.model.attention import UNMASKED
from attnmux.transformers.model.part import ModelPart, TokenBytes
from attnmux.transformers.model.sparse.block_indexers import BlockIndexer, MeanIndexer
from attnmux.transformers.model.sparse.index_pool import IndexKPool
from attnmux.transformers.model.sparse.key_indexers import KeyIndexer
from attnmux.transformers.model.sparse.model_indexer import IndexShape
from attnmux.transformers.model.sparse.picks import BlockPicker, KeyPicker
from attnmux.transformers.options import RunnerOptions

Indexer = KeyIndexer | BlockIndexer | MeanIndexer
KINDS: tuple[type[Indexer], ...] = (KeyIndexer, BlockIndexer, MeanIndexer)


@dataclass(kw_only=True, eq=False)
class Indexers(ModelPart):
    """The indexers of a model."""

    unpieced = "indexers, which read the running step"
    uncompiled = (
        "sparse attention",
        "a model without indexers, which read the running step",
    )

    each: tuple[Indexer, ...]
    shape: IndexShape
    picker: KeyPicker | BlockPicker | None = None
    """While there is none, nothing is picked: as a probe runs, and if every key is seen."""
    is_captured: bool = field(default=True, init=False)
    """Whether steps have static shapes: any that do not run `eager`."""

    @classmethod
    def find(cls, model: torch.nn.Module, options: RunnerOptions) -> Indexers | None:
        """None also for an unknown one, which recording refuses, and for contexts in which they
        pick every key. Raises InvalidInput for indexers that differ from each other."""
        found = [
            kind.find(child, owner)
            for owner in model.modules()
            for child in owner.children()
            for kind in KINDS
            if kind.is_built(child)
        ]
        known = tuple(indexer for indexer in found if indexer is not None)
        if not found or len(known) < len(found):
            return None
        shapes = {indexer.shape for indexer in known}
        if len(shapes) > 1:
            expected = "the same in all layers"
            raise InvalidInput("indexers", got=f"{sorted(shapes)}", expected=expected)
        indexers = cls(each=known, shape=shapes.pop())
        if indexers.shape.reach < options.max_context_len:
            return indexers
        indexers.bind()  # their own code would pick, and need the mask that nobody made
        return None

    def bind(self) -> None:
        """Give the modules a forward that writes their picks to the batch of the running step."""
        for indexer in self.each:
            indexer.module.forward = self._bound(indexer)
            mask = UNMASKED.to(next(indexer.module.parameters()).device)
            unmasked = partial(_unmasked, mask)
            indexer.owner.register_forward_pre_hook(unmasked, with_kwargs=True)

    def mark(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        """The layers; those with an indexer of blocks see blocks.

        Raises InvalidInput if its heads do not fit the layer's, or the layer hides other keys.
        """
        with_blocks = {indexer.module.layer_idx for indexer in self.each if self.shape.block_size}
        return tuple(
            self._marked(layer) if layer.layer_id in with_blocks else layer for layer in layers
        )

    def ask(self, ways: Sequence[Request], options: RunnerOptions) -> list[Request]:
        latent = [way for way in ways if way.latent]
        if not latent and not self.shape.block_size:
            expected = "absorbed, with a plain linear kv_b_proj: an indexer picks latent rows"
            raise InvalidInput("mla", got=options.mla or "another projection", expected=expected)
        if options.draft_topk > 1:
            expected = "1, chains of drafts: an indexer counts places"
            raise InvalidInput("draft_topk", got=options.draft_topk, expected=expected)
        if not options.ranks.building.run_indexers:
            expected = "1, or --tp alone: an indexer reads all keys of a request"
            raise InvalidInput("ranks", got=options.ranks.size, expected=expected)
        picks = {"index_topk": self.shape.topk}
        if latent:
            return [way.replace(origin="model", kind="nsa", **picks) for way in latent]
        if options.ranks.building.head_ranks > 1:
            expected = "1: every rank would need only the picks for its own heads"
            raise InvalidInput("ranks", got=options.ranks.building.head_ranks, expected=expected)
        picks["index_block_size"] = self.shape.block_size
        return [way.replace(origin="model", **picks) for way in ways]

    def _dtype(self, decision: Decision) -> torch.dtype:
        """Dtype of their keys: as coarse as the KV cache, if that is e4m3 and keys are stored."""
        kv_dtype = torch_dtype(decision.kv_dtype)
        model_dtype = torch_dtype(decision.request.dtype or decision.kv_dtype)
        coarse = kv_dtype == torch.float8_e4m3fn and not self.shape.begun_block
        return kv_dtype if coarse else model_dtype

    def bytes_per_token(self, decision: Decision) -> TokenBytes:
        keys = IndexKPool.bytes_per_token(
            dtype=self._dtype(decision), num_layers=len(self.each), head_dim=self.shape.head_dim
        )
        return TokenBytes(beside=keys)

    def attach(self, context: BackendContext, decision: Decision) -> None:
        """Pick from now on, by the kernels that are offered for the context's device."""
        shape, table = self.shape, context.req_to_token_pool.req_to_token
        pool = IndexKPool(
            num_slots=context.token_to_kv_pool.num_slots,
            dtype=self._dtype(decision),
            layer_ids=[indexer.module.layer_idx for indexer in self.each],
            head_dim=shape.head_dim,
            device=context.device,
        )
        if shape.block_size:
            self.picker = BlockPicker(
                pool=pool,
                req_to_token=table,
                topk=shape.places,
                block_size=shape.block_size,
                heads=shape.heads,
                rankings={
                    indexer.module.layer_idx: indexer.ranking
                    for indexer in self.each
                    if not isinstance(indexer, KeyIndexer)
                },
            )
            return
        kernel = shared_kernel("index_scores", context)
        self.picker = KeyPicker(pool=pool, req_to_token=table, topk=shape.topk, kernel=kernel)

    def captured(self, config: GraphConfig) -> GraphConfig:
        return replace(config, index_topk=self.shape.places, index_heads=self.shape.heads)

    @contextmanager
    def eager(self, batch: ForwardBatch) -> Iterator[ForwardBatch]:
        """Pick by the lengths on the host, into room on the batch."""
        assert self.picker is not None
        self.is_captured = False
        try:
            yield replace(batch, topk_indices=self.picker.room(batch))
        finally:
            self.is_captured = True

    def _bound(self, indexer: Indexer) -> Callable[..., bool | torch.Tensor]:
        answer = indexer.answer

        def forward(*args: Any, **kwargs: Any) -> bool | torch.Tensor:  # noqa: ANN401  # what its own forward takes
            if self.picker is not None:
                parts = indexer.project(*args, **kwargs)
                # Its arguments are the parts of its own kind of indexer
                pick: Callable[..., None] = self.picker.pick
                batch, captured = ForwardContext.current().batch, self.is_captured
                pick(indexer.module.layer_idx, *parts, batch, captured=captured)
            return answer

        return forward

    def _marked(self, layer: LayerSpec) -> LayerSpec:
        heads, q_heads, kv_heads = self.shape.heads, layer.tp_q_head_num, layer.tp_k_head_num
        if heads % kv_heads or q_heads % heads:
            got = f"blocks for {heads} heads, in a layer of {q_heads}/{kv_heads} heads"
            raise InvalidInput("indexer", got=got, expected="some for each KV head, evenly")
        return replace(layer, index_block_size=self.shape.block_size)


def _unmasked(
    mask: torch.Tensor,
    module: torch.nn.Module,
    args: tuple[object, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """Hand a mask to a layer that gets none, and slices it for its indexer."""
    if kwargs.get("attention_mask") is None:
        kwargs = {**kwargs, "attention_mask": mask}
    return args, kwargs
