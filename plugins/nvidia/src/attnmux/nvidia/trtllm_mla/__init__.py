"""TensorRT-LLM's MLA decode through flashinfer: trtllm-gen on SM100, XQA on SM120.

backend.py    the contract's methods; read it first
calls.py      which kernel serves a device, and what it is told at every call of a layer
padding.py    tables of whole tiles, and drafts of different numbers as equally many
kernels.py    what is taken from the library; factory.py alone imports it
"""

from __future__ import annotations

from attnmux.nvidia.trtllm_mla.backend import TRTLLMMLABackend
from attnmux.nvidia.trtllm_mla.kernels import Kernels

__all__ = ["Kernels", "TRTLLMMLABackend"]
