"""Attention backends of attnmux inside vLLM. Importing this module imports neither torch nor vLLM.

vLLM finds `plugin.py` through entry points, and the classes through the names registered there.
"""

from __future__ import annotations

from attnmux.vllm.versions import TRIED, VllmVersionWarning

__all__ = ["TRIED", "VllmVersionWarning"]
