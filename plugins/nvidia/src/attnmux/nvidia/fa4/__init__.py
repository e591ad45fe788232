"""FlashAttention 4 (CuTe DSL) through `flash_attn.cute`: prefill.

backend.py    the contract's methods; read it first
calls.py      once: what the library is told at every call of a layer
compiling.py  the launches that compile each layer's kernels before the first step
kernels.py    what is taken from the library; factory.py alone imports it
"""

from __future__ import annotations

from attnmux.nvidia.fa4.backend import FA4Backend
from attnmux.nvidia.fa4.kernels import Kernels

__all__ = ["FA4Backend", "Kernels"]
