"""Attention backends that need no accelerator. `plugin.py` advertises them."""

from __future__ import annotations

from attnmux.core.plugin import lazy_face

__getattr__, __dir__ = lazy_face(__name__)
