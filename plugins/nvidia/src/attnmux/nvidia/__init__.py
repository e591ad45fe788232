"""NVIDIA devices, and backends on NVIDIA's kernel libraries; `plugin.py` is the entry point."""

from __future__ import annotations

from attnmux.core.plugin import lazy_face

__getattr__, __dir__ = lazy_face(__name__)
