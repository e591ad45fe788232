"""AMD devices, and backends around AMD's kernel libraries. `plugin.py` advertises them."""

from __future__ import annotations

from attnmux.core.plugin import lazy_face

__getattr__, __dir__ = lazy_face(__name__)
