"""The public names of attnmux for engine authors. Importing this module imports no torch.

`__init__.pyi` lists the names, a line each. A name's module is imported on first use. Vendors also
import from `attnmux.core.plugin`, and authors of commands from `attnmux.core.verbs`.
"""

from __future__ import annotations

from attnmux.core.faces import lazy_face

__getattr__, __dir__ = lazy_face(__name__, needs="attnmux-core[torch]")
