"""Attention backends of attnmux inside SGLang.

Importing this module imports neither torch nor SGLang.

SGLang finds `plugin.py` through its entry points.
"""

from __future__ import annotations

from attnmux.sglang.interfaces import INTERFACES, SglangInterfaceWarning

__all__ = ["INTERFACES", "SglangInterfaceWarning"]
