"""Prefixes that requests share: trees over token ids, page by page."""

from __future__ import annotations

from attnmux.transformers.prefixes.node import PrefixNode
from attnmux.transformers.prefixes.state_tree import StatePrefixTree
from attnmux.transformers.prefixes.tree import PrefixMatch, PrefixTree
from attnmux.transformers.prefixes.window_state_tree import WindowStatePrefixTree
from attnmux.transformers.prefixes.window_tree import WindowPrefixTree, WindowSpan

__all__ = [
    "PrefixMatch",
    "PrefixNode",
    "PrefixTree",
    "StatePrefixTree",
    "WindowPrefixTree",
    "WindowSpan",
    "WindowStatePrefixTree",
]
