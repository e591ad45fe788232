"""FlashMLA's dense decode, in plain torch, as three packages offer it.

kernel.py      what both carry; read it first
sgl_kernel.py  `sgl_kernel.flash_mla`, of sglang-kernel 0.4.10
flash_mla.py   `flash_mla`, of sgl-flash-mla 1.0.0
vllm.py        operators of vLLM 0.33
"""
