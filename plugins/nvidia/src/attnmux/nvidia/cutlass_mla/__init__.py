"""CUTLASS's decode kernel for MLA, through `sgl_kernel`.

backend.py   the contract's methods; read it first
calls.py     once: what the library is told at every call of a layer
kernels.py   what is taken from the library; factory.py alone imports it
trial.py     the launch that shows whether the library runs on a device
"""

from __future__ import annotations

from attnmux.nvidia.cutlass_mla.backend import CutlassMLABackend
from attnmux.nvidia.cutlass_mla.kernels import Kernels

__all__ = ["CutlassMLABackend", "Kernels"]
