"""Hugging Face models, unchanged, on any attention backend of attnmux.

`__init__.pyi` lists the public names, a line each. The first use of one registers the attention
implementation "attnmux" with transformers. Importing this package alone imports neither torch nor
transformers.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

_LISTED = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_MODULES = {
    name: module
    for module, name in re.findall(r"^from (\S+) import (\w+) as", _LISTED, re.MULTILINE)
}

__all__ = sorted(_MODULES)  # as the stub lists them


def __getattr__(name: str) -> object:
    """Import the module of a public name on first use, and register the implementation."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(f"{__name__}.implementation")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
