"""Attention by torch's compiled `flex_attention`, over pages where they lie.

backend.py   the contract's methods; read it first
tiles.py     a step's queries, cut into tiles of one request each
keys.py      where keys are: blocks of the pool, or of scratch that they are gathered to
ranges.py    which keys each query sees, and so which blocks each tile reads
plan.py      these three put together, for the layers that share them
fixed.py     the same in buffers that captured graphs point at
spec.py      the shapes that a kernel is compiled for
kernel.py    the kernel
"""

from attnmux.cpu.flex_attention.backend import FlexAttentionBackend

__all__ = ["FlexAttentionBackend"]
