"""Backends made of backends: results of a decision, never candidates."""

from attnmux.core.compose.by_batch_size import BatchSizeAttnBackend
from attnmux.core.compose.hybrid import HybridAttnBackend

__all__ = ["BatchSizeAttnBackend", "HybridAttnBackend"]
