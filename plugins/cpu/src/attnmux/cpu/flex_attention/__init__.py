"""Attention by torch's compiled `flex_attention`, which reads pages in place.

backend.py   the contract's methods; read it first
plan.py      once a step: what the kernel is given, also in buffers that captured graphs read
blocks.py    queries in tiles, keys in blocks, and the blocks that each tile reads
kernel.py    the kernel, and the shapes that it is compiled for
"""

from attnmux.cpu.flex_attention.backend import FlexAttentionBackend

__all__ = ["FlexAttentionBackend"]
