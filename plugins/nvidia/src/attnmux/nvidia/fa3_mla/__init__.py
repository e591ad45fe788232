"""FlashAttention 3 over MLA's latent cache, through `sgl_kernel`.

backend.py    the contract's methods; read it first
calls.py      once: what the library is told at every call of a layer
trial.py      the launch that shows whether the library runs on a device

Steps, schedules and draft trees are those of `fa3`.
"""

from __future__ import annotations

from attnmux.nvidia.fa3.kernels import Kernels
from attnmux.nvidia.fa3_mla.backend import FA3MLABackend

__all__ = ["FA3MLABackend", "Kernels"]
