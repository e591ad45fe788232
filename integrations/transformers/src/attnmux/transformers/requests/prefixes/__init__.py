"""Prefixes that requests share: trees over token ids, page by page."""

from __future__ import annotations

from attnmux.transformers.requests.prefixes.node import PrefixNode
from attnmux.transformers.requests.prefixes.state_tree import StatePrefixTree
from attnmux.transformers.requests.prefixes.tree import PrefixMatch, PrefixTree
from attnmux.transformers.requests.prefixes.window_tree import (
    WindowPrefixTree,
    WindowSpan,
    WindowStatePrefixTree,
)

__all__ = [
    "PrefixMatch",
    "PrefixNode",
    "PrefixTree",
    "StatePrefixTree",
    "WindowPrefixTree",
    "WindowSpan",
    "WindowStatePrefixTree",
]
