"""The public names of attnmux for authors of commands. `__init__.pyi` lists them; a name's module
is imported on first use."""

from __future__ import annotations

from attnmux.core.faces import lazy_face

__getattr__, __dir__ = lazy_face(__name__, needs="attnmux-core[torch]")
