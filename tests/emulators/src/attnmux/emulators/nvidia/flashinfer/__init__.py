"""flashinfer 0.7.2 in plain torch: the wrappers that FlashInferBackend uses, on any device.

Signatures, layouts and rules are the library's:

- `plan` takes lengths and `run` obeys them: rows of Q, dtypes and window are those of the plan.
- With `use_cuda_graph` a wrapper's batch size is fixed, its buffers are the caller's, and `plan`
  copies into them; `run` reads these buffers alone, in static shapes and without a host read.
- Plans lie in the int workspace. A wrapper whose workspace another one has planned into since gives
  NaN, as the library gives garbage.
- A captured kernel has more blocks than its plan. Where keys are split the plan masks the others;
  with `disable_split_kv` they read what no plan set.
- LSE is in base 2; a row without keys has output 0 and LSE -inf.
- Lengths of prefixes in a plan mask by items, whatever else it says: see `item_keep`.
- `jit_args` select the softmax with sinks, which takes sinks and scale of each run by position and
  looks at no other scale, cap or factor of K; LSE has the sinks in it.
- A grid of no blocks cannot be launched.
"""

from attnmux.emulators.nvidia.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from attnmux.emulators.nvidia.flashinfer.mla import (
    BatchMLAPagedAttentionWrapper,
    MLAPlanMetadata,
)
from attnmux.emulators.nvidia.flashinfer.numerics import merge_state_in_place
from attnmux.emulators.nvidia.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from attnmux.emulators.nvidia.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from attnmux.emulators.nvidia.flashinfer.variants import (
    attention_sink_decl,
    get_batch_prefill_attention_sink_uri,
)

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "MLAPlanMetadata",
    "attention_sink_decl",
    "fast_decode_plan",
    "get_batch_prefill_attention_sink_uri",
    "merge_state_in_place",
]
