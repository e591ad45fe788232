"""Portable Triton kernels: they belong to no vendor. `plugin.py` advertises them."""

from __future__ import annotations

from attnmux.core.plugin import lazy_face

__getattr__, __dir__ = lazy_face(__name__)
