"""TensorRT-LLM's MHA kernels through flashinfer: trtllm-gen on SM100, XQA and fmha_v2 elsewhere.

backend.py    the contract's methods; read it first
families.py   which kernels serve which devices
calls.py      once: what the library is told at every call of a layer
decode.py     steps with the same number of queries a request: decode and verify
masks.py      what XQA lets draft tokens see
prefill.py    all other steps, over the pool's pages
staging.py    the same for kernels that want K and V in one tensor
kernels.py    what is taken from the library; factory.py alone imports it
"""

from __future__ import annotations

from attnmux.nvidia.trtllm_mha.backend import TRTLLMMHABackend
from attnmux.nvidia.trtllm_mha.kernels import Kernels

__all__ = ["Kernels", "TRTLLMMHABackend"]
