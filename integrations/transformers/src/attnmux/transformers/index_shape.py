"""What the indexers of a model pick."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class IndexShape:
    """The same for all indexers of a model."""

    topk: int
    """Keys of each token, or blocks of each token and head."""
    head_dim: int
    """Of the keys that are scored."""
    block_size: int = 0
    """Keys of a block; 0 where single keys are picked."""
    heads: int = 0
    """Heads with blocks of their own."""
    local_blocks: int = 0
    """Blocks that are always picked, up to the token's own."""

    @property
    def reach(self) -> int:
        """The longest context of which they pick every key."""
        return self.topk * (self.block_size or 1)


NO_PICKS = IndexShape(topk=0, head_dim=0)
"""Of a model without indexers."""
