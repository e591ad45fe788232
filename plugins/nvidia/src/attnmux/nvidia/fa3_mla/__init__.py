"""FlashAttention 3 over MLA's latent cache, through `sgl_kernel`.

backend.py    the contract's methods; read it first
calls.py      once: what the library is told at every call of a layer
drafts.py     a draft tree's mask as keys of each draft token
kernels.py    what is taken from the library; factory.py alone imports it
trial.py      the launch that shows whether the library runs on a device
"""

from __future__ import annotations

from attnmux.nvidia.fa3_mla.backend import FA3MLABackend
from attnmux.nvidia.fa3_mla.kernels import Kernels

__all__ = ["FA3MLABackend", "Kernels"]
