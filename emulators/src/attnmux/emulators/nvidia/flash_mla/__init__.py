"""FlashMLA's dense decode, in plain torch, as two packages offer it.

kernel.py      what both carry; read it first
sgl_kernel.py  `sgl_kernel.flash_mla`, of sglang-kernel 0.4.5
flash_mla.py   `flash_mla`, of sgl-flash-mla 1.0.0
"""
