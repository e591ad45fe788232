"""TensorRT-LLM's MHA kernels through flashinfer: trtllm-gen on SM100, XQA and fmha_v2 elsewhere.

backend.py  the contract's methods; read it first
layers.py   the kernels, a layer's arguments, and what both halves of the backend are
decode.py   steps with the same number of queries a request: decode and verify
prefill.py  all other steps
"""

from __future__ import annotations

from attnmux.nvidia.trtllm_mha.backend import TRTLLMMHABackend, make
from attnmux.nvidia.trtllm_mha.layers import TRTLLMMHAKernels

__all__ = ["TRTLLMMHABackend", "TRTLLMMHAKernels", "make"]
