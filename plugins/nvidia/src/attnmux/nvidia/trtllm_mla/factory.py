"""Where flashinfer is imported: called for the backend that was chosen."""

from __future__ import annotations

from collections.abc import Mapping

from flashinfer.mla import (  # type: ignore[import-not-found]  # an optional library
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)

from attnmux.core.backend import NO_OPTIONS
from attnmux.core.context import BackendContext
from attnmux.nvidia.trtllm.trial import try_backend
from attnmux.nvidia.trtllm_mla.backend import TRTLLMMLABackend
from attnmux.nvidia.trtllm_mla.kernels import Kernels

KERNELS = Kernels(
    trtllm_batch_decode_with_kv_cache_mla=trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla=xqa_batch_decode_with_kv_cache_mla,
)


def make(context: BackendContext, options: Mapping[str, object] = NO_OPTIONS) -> TRTLLMMLABackend:
    """The backend over the installed library.

    Raises BackendFailed where its kernels do not compile or do not run on the context's device.
    """
    backend = TRTLLMMLABackend(context, options, KERNELS)
    try_backend("nvidia/trtllm_mla", backend)
    return backend
