"""Dual chunk attention through FlashAttention 3 of `sgl_kernel`.

backend.py    the contract's methods; read it first
pieces.py     a step's queries by request and chunk
regions.py    where the keys of each piece are, by the query that meets them
merging.py    attention over the regions as one softmax
layers.py     once: what the library is told at every call of a layer
kernels.py    what is taken from the library; factory.py alone imports it
trial.py      the launch that shows whether the library runs on a device
"""

from __future__ import annotations

from attnmux.nvidia.dual_chunk.backend import DualChunkBackend
from attnmux.nvidia.dual_chunk.kernels import Kernels

__all__ = ["DualChunkBackend", "Kernels"]
