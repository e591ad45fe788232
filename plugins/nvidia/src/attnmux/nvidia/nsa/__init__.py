"""DeepSeek's sparse attention over latents: FlashMLA's sparse prefill kernel in every step.

backend.py    the contract's methods; read it first
calls.py      once: what the library is told at every call of a layer
picks.py      the keys of a call: slots of what the indexer picked, and e4m3 rows in bfloat16
kernels.py    what is taken from the library
providers.py  the packages that it comes in, and how they differ; factory.py alone imports one
trial.py      the launch that shows whether the library runs on a device, and its unit of LSE
"""

from __future__ import annotations

from attnmux.nvidia.nsa.backend import NSABackend
from attnmux.nvidia.nsa.kernels import Kernels

__all__ = ["Kernels", "NSABackend"]
