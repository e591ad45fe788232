"""Where flashinfer is imported: called for the backend that was chosen."""

from __future__ import annotations

from collections.abc import Mapping

from flashinfer import (  # type: ignore[import-not-found]  # an optional library
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    merge_state_in_place,
)
from flashinfer.decode import fast_decode_plan  # type: ignore[import-not-found]  # an optional library
from flashinfer.jit.attention import (  # type: ignore[import-not-found]  # an optional library
    get_batch_prefill_attention_sink_uri,
)
from flashinfer.jit.attention.variants import (  # type: ignore[import-not-found]  # an optional library
    attention_sink_decl,
)

from attnmux.core.backend import NO_OPTIONS
from attnmux.core.context import BackendContext
from attnmux.nvidia.flashinfer.backend import FlashInferBackend
from attnmux.nvidia.flashinfer.kernels import Kernels, SinkVariant
from attnmux.nvidia.flashinfer.sinks import BACKEND

KERNELS = Kernels(
    decode=BatchDecodeWithPagedKVCacheWrapper,
    paged=BatchPrefillWithPagedKVCacheWrapper,
    ragged=BatchPrefillWithRaggedKVCacheWrapper,
    merge_state_in_place=merge_state_in_place,
    fast_decode_plan=fast_decode_plan,
    sinks=SinkVariant(
        source=attention_sink_decl[BACKEND], module_name=get_batch_prefill_attention_sink_uri
    ),
)


def make(context: BackendContext, options: Mapping[str, object] = NO_OPTIONS) -> FlashInferBackend:
    """The backend over the installed library."""
    return FlashInferBackend(context, options, KERNELS)
