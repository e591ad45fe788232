"""Hugging Face models, unchanged, on any attention backend of attnmux.

`__init__.pyi` lists the public names, a line each. The first use of one registers the attention
implementation "attnmux" with transformers. Importing this package alone imports neither torch nor
transformers.
"""

from __future__ import annotations

from attnmux.core.plugin import lazy_face

__getattr__, __dir__ = lazy_face(__name__, first=f"{__name__}.run.implementation")
