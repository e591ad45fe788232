"""The shape of the picks of a model's indexers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class IndexShape:
    """The same for all indexers of a model."""

    topk: int
    """Keys of each token, or blocks of each token and head."""
    head_dim: int
    """Stored values of each token: its key, and other parts of a block's key."""
    block_size: int = 0
    """Keys of a block; 0 if single keys are picked."""
    heads: int = 0
    """Heads with blocks of their own."""
    begun_block: bool = False
    """Whether a token also sees the block that it is in while that is not whole. Keys are made of
    whole blocks then, of values in the model's dtype."""

    @property
    def places(self) -> int:
        """Places of each token, and head, in `ForwardBatch.topk_indices`."""
        return self.topk + self.begun_block

    @property
    def reach(self) -> int:
        """The longest context in which they pick every key."""
        return self.topk * (self.block_size or 1)
