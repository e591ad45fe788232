"""FlashMLA's dense decode kernels.

backend.py    the contract's methods; read it first
calls.py      once: what the library is told at every call of a layer
plans.py      once a step: block tables, lengths, and how thread blocks share the keys
kernels.py    what is taken from the library
providers.py  the packages that it comes in, and how they differ; factory.py alone imports one
trial.py      the launch that shows whether the library runs on a device
"""

from __future__ import annotations

from attnmux.nvidia.flashmla.backend import FlashMLABackend
from attnmux.nvidia.flashmla.kernels import Kernels

__all__ = ["FlashMLABackend", "Kernels"]
