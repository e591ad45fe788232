"""Composites of attention backends. Importing this module imports no torch.

`plugin.py` lists the parts, and `__init__.pyi` the public names; a name's module is imported on
first use.
"""

from __future__ import annotations

from attnmux.core.plugin import lazy_face

__getattr__, __dir__ = lazy_face(__name__, needs="attnmux-parts[torch]")
