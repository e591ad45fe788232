"""A module that makes a key of each block of tokens, and the indexer in it that picks among them.

DeepSeek-V4 has such modules, of two kinds. One is known by the name of its class, and served if its
own forward makes and shows the keys that ours does.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.transformers.model.probe import TOLERANCE, are_alike
from attnmux.transformers.model.sparse.compressed_keys import BlockRows, IndexQueries
from attnmux.transformers.model.sparse.compressed_pool import CompressedShape
from attnmux.transformers.model.sparse.ranking import best_keys, index_scores

OVERLAPPING = {"DeepseekV4HCACompressor": False, "DeepseekV4CSACompressor": True}
"""By the class of a module: whether the first half of its projections is for the key of the next
block."""
TRIED_BLOCKS, TRIED_TOPK = 5, 2
"""While a module is compared with ours."""


@dataclass(kw_only=True, slots=True, eq=False)
class Compressor:
    """One module, and the indexer in it."""

    module: Any
    owner: Any
    """The attention module that calls it."""
    queries: IndexQueries | None = None
    """Queries of the running layer."""

    @property
    def layer_id(self) -> int:
        return int(self.owner.layer_idx)

    @property
    def indexer(self) -> Any:  # noqa: ANN401  # the model's module, or None
        return getattr(self.module, "indexer", None)

    @property
    def overlaps(self) -> bool:
        return OVERLAPPING[type(self.module).__name__]

    @property
    def shape(self) -> CompressedShape:
        indexer, head_dim = self.indexer, self.module.head_dim
        index_dim = 0 if indexer is None else indexer.head_dim
        num_blocks = 2 if self.overlaps else 1
        return CompressedShape(
            block_size=self.module.compress_rate,
            num_blocks=num_blocks,
            row_dim=2 * num_blocks * (head_dim + index_dim),
            head_dim=head_dim,
            index_dim=index_dim,
            topk=0 if indexer is None else indexer.index_topk,
        )

    def rows(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The rows of tokens, [T, row_dim]: values and gates, then those of the indexer."""
        parts = [self.module] if self.indexer is None else [self.module, self.indexer]
        projections = [
            projection for part in parts for projection in (part.kv_proj, part.gate_proj)
        ]
        return torch.cat([project(hidden_states)[0] for project in projections], dim=-1)

    def make(self, blocks: BlockRows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Make the keys of blocks: see `MakesKeys`."""
        if self.indexer is None:
            return self._made(self.module, blocks.rows, blocks), None
        width = 4 * self.module.head_dim if self.overlaps else 2 * self.module.head_dim
        values, index = blocks.rows[..., :width], blocks.rows[..., width:]
        return self._made(self.module, values, blocks), self._made(self.indexer, index, blocks)

    def asks(
        self, hidden_states: torch.Tensor, q_residual: torch.Tensor, position_ids: torch.Tensor
    ) -> IndexQueries | None:
        """The queries by which the indexer scores keys; None without one."""
        indexer = self.indexer
        if indexer is None:
            return None
        q = indexer.q_b_proj(q_residual).view(1, -1, indexer.num_heads, indexer.head_dim)
        q = self._turned(indexer, q.transpose(1, 2), position_ids)
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden_states)[0].float()
        scale = scorer.weights_scaling * scorer.softmax_scale
        return IndexQueries(q=q[0].transpose(0, 1), weights=weights * scale)

    @torch.no_grad()
    def agrees(self) -> bool:
        """Whether the module's own forward makes and shows our keys of random tokens."""
        module, size, weight = self.module, self.shape.block_size, self.module.kv_proj.weight
        draw = torch.Generator(device="cpu").manual_seed(0)
        count = (TRIED_BLOCKS + 1) * size - 1
        hidden = torch.randn(1, count, weight.shape[1], generator=draw).to(weight)
        residual = hidden
        if self.indexer is not None:
            width = self.indexer.q_b_proj.weight.shape[1]
            residual = torch.randn(1, count, width, generator=draw).to(weight)
        places = torch.arange(count, device=weight.device)
        with _few_picks(self.indexer):
            try:
                own, hides = type(module).forward(module, hidden, residual, places[None], None, 0)
            except Exception:  # its forward takes something else: another version of the model
                return False
        ends = places[size - 1 :: size]
        seen = ends.unsqueeze(1) - places[: self.shape.earlier_tokens + 1].flip(0)
        rows = self.rows(hidden)[seen.clamp(min=0)]
        keys, index_keys = self.make(BlockRows(rows=rows, missing=seen < 0, starts=ends - size + 1))
        if own.shape != (1, 1, *keys.shape) or hides.shape != (1, 1, count, len(keys)):
            return False
        if not are_alike(own[0, 0], keys):
            return False
        queries, last = self.asks(hidden, residual, places[None]), (places + 1) // size - 1
        theirs, number = hides[0, 0] == 0, torch.arange(len(keys), device=weight.device)
        if queries is None or index_keys is None:
            return torch.equal(theirs, number <= last.unsqueeze(1))
        scores = index_scores(queries.q, index_keys, queries.weights)
        ours = (best_keys(scores, last, TRIED_TOPK).unsqueeze(-1) == number).any(1)
        worst, expected = (scores.masked_fill(~mask, torch.inf).amin(-1) for mask in (theirs, ours))
        as_many = torch.equal(theirs.sum(-1), ours.sum(-1))
        limit = TOLERANCE * scores.abs().max()
        return as_many and not bool((expected - worst > limit).any())

    def _made(self, module: Any, rows: torch.Tensor, blocks: BlockRows) -> torch.Tensor:  # noqa: ANN401
        """[n, D]: for each value the mean over the tokens, weighed by the softmax of their gates
        and of a bias for the place in the block; normed, and rotated to the block's first place."""
        size, dim = module.compress_rate, module.head_dim
        values, gates = rows.chunk(2, dim=-1)
        bias = module.position_bias
        if self.overlaps:
            values, gates = (
                torch.cat([tensor[:, :size, :dim], tensor[:, size:, dim:]], dim=1)
                for tensor in (values, gates)
            )
            bias = torch.cat([bias[:, :dim], bias[:, dim:]])
        missing = blocks.missing.unsqueeze(-1)
        gates = (gates + bias).masked_fill(missing, -torch.inf)
        weights = gates.softmax(dim=1, dtype=torch.float32).to(values.dtype)
        normed = module.kv_norm((values.masked_fill(missing, 0) * weights).sum(dim=1))
        turned = self._turned(module, normed[None, None], blocks.starts.unsqueeze(0))
        return turned[0, 0]

    def _turned(self, module: Any, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """x [1, H, n, D] at places [1, n]."""
        turns = module.rotary_emb(x, position_ids=places, layer_type=module.rope_layer_type)
        rotary = pkgutil.resolve_name(f"{type(self.module).__module__}:apply_rotary_pos_emb")
        turned: torch.Tensor = rotary(x, *turns)
        return turned


@contextmanager
def _few_picks(indexer: Any) -> Iterator[None]:  # noqa: ANN401  # the model's module, or None
    """Let the indexer pick so few keys that it has a choice."""
    if indexer is None:
        yield
        return
    kept, indexer.index_topk = indexer.index_topk, TRIED_TOPK
    try:
        yield
    finally:
        indexer.index_topk = kept
