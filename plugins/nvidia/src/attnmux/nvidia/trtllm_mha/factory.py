"""Where flashinfer is imported: called for the backend that was chosen."""

from __future__ import annotations

from collections.abc import Mapping

from flashinfer.decode import (  # type: ignore[import-not-found]  # an optional library
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from flashinfer.prefill import (  # type: ignore[import-not-found]  # an optional library
    trtllm_batch_context_with_kv_cache,
    trtllm_fmha_v2_prefill,
)

from attnmux.core.backend import NO_OPTIONS
from attnmux.core.context import BackendContext
from attnmux.nvidia.trtllm.trial import try_backend
from attnmux.nvidia.trtllm_mha.backend import TRTLLMMHABackend
from attnmux.nvidia.trtllm_mha.kernels import Kernels

KERNELS = Kernels(
    xqa_batch_decode_with_kv_cache=xqa_batch_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache=trtllm_batch_decode_with_kv_cache,
    trtllm_fmha_v2_prefill=trtllm_fmha_v2_prefill,
    trtllm_batch_context_with_kv_cache=trtllm_batch_context_with_kv_cache,
)


def make(context: BackendContext, options: Mapping[str, object] = NO_OPTIONS) -> TRTLLMMHABackend:
    """The backend over the installed library.

    Raises BackendFailed where its kernels do not compile or do not run on the context's device.
    """
    backend = TRTLLMMHABackend(context, options, KERNELS)
    try_backend("nvidia/trtllm_mha", backend)
    return backend
