"""The public names of attnmux for vendors. `__init__.pyi` lists them; a name's module is imported
on first use, so that a `plugin.py` imports no torch."""

from __future__ import annotations

from attnmux.core.faces import lazy_face

__getattr__, __dir__ = lazy_face(__name__, needs="attnmux-core[torch]")
