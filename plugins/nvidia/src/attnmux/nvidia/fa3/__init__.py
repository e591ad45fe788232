"""FlashAttention 3 through `sgl_kernel`.

backend.py    the contract's methods; read it first
stepping.py   a step's page tables, prepared once
drafts.py     a draft tree's mask as keys of each draft token
schedules.py  the library's own schedule of a step, computed once for all layers
calls.py      once: what the library is told at every call of a layer
kernels.py    what is taken from the library; factory.py alone imports it
trial.py      the launch that shows whether the library runs on a device
"""

from __future__ import annotations

from attnmux.nvidia.fa3.backend import FA3Backend
from attnmux.nvidia.fa3.kernels import Kernels

__all__ = ["FA3Backend", "Kernels"]
