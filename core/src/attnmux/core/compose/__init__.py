"""Backends made of backends: results of a decision, never candidates."""

from attnmux.core.compose.hybrid import HybridAttnBackend

__all__ = ["HybridAttnBackend"]
