"""Attention backends of attnmux inside vLLM. Importing this module imports neither torch nor vLLM.

vLLM finds `plugin.py` through entry points. It asks this module for the class that is registered
there when the user names it.
"""

from __future__ import annotations

from typing import Any

from attnmux.vllm.interfaces import BACKEND, INTEGRATION, VllmInterfaceWarning

__all__ = ["VllmInterfaceWarning"]


def __getattr__(name: str) -> Any:  # noqa: ANN401  # the class, which is imported late
    """`AttnmuxBackend`. Raises AttnmuxError for a vLLM without the interfaces that it uses."""
    if name != "AttnmuxBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    INTEGRATION.require(BACKEND)
    from attnmux.vllm.backend import AttnmuxBackend  # noqa: PLC0415  # imports what was checked

    return AttnmuxBackend
