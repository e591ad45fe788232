"""FlashAttention 3 of `sgl_kernel`, in plain torch.

What an adapter can notice of the real functions:

- Q is [B, Tq, Hq, D], or [total, Hq, D] with `cu_seqlens_q`; LSE is the natural logarithm, float32,
  [B, Hq, Tq] or [Hq, total].
- `causal`, the window and the chunk count positions from the end of a request's keys: its last
  query is at its last key.
- A row without keys has output 0. With sinks its LSE is the sink where other rows of its block have
  keys (here: of its request); where none has any, LSE is -inf.
- Rows of Q that no request owns are not computed: `out` keeps its values.
- Q, K and V have one dtype. With float8_e4m3fn the output is bfloat16, the softmax's weights are
  rounded to float8_e4m3fn too, and the descales [B, Hkv] multiply.
- With `qv`, of V's dims, a logit is q · k + qv · v, and the default scale counts both dims.
- Without any keys, an empty K and V, LSE is +inf.
- `flash_attn_varlen_func` ignores `page_table`.
- K that no query sees may hold anything. V must be finite there: the kernel multiplies whole blocks
  by weights of 0. They include V before a window, V after a request's end in a page of a block or
  more, and V of the packed requests that follow. Smaller pages are read up to the request's end.
  Here every block counts.
- More than 64 sinks are written past the end of the kernels' array.
- A launch that fails ends the process. Here it raises RuntimeError.
- `scheduler_metadata` of another step or of other arguments gives garbage, here NaN.
- `merge_state_v2` assumes contiguous outputs and LSE [T, H]; where neither side has keys it gives
  NaN.

Shapes are static, and nothing is read on the host.
"""

from attnmux.emulators.nvidia.sgl_flash_attn.functions import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    merge_state_v2,
)
from attnmux.emulators.nvidia.sgl_flash_attn.scheduling import get_scheduler_metadata

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "merge_state_v2",
]
