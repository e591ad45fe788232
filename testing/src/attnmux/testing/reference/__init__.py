"""Attention and linear layers in float64, slow and plain: the only oracle."""

from __future__ import annotations

from attnmux.core.plugin import lazy_face

__getattr__, __dir__ = lazy_face(__name__)
