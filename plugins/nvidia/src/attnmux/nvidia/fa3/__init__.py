"""FlashAttention 3 through `sgl_kernel`: the backend, without the library.

`factory.py` is the one module that imports it.
"""

from __future__ import annotations

from attnmux.nvidia.fa3.backend import FA3Backend
from attnmux.nvidia.fa3.kernels import Kernels

__all__ = ["FA3Backend", "Kernels"]
