"""FlashAttention 3 as `sgl_kernel` offers it, in plain torch.

What the real functions do with their arguments, as far as an adapter can notice:

- Q is [B, Tq, Hq, D], or [total, Hq, D] with `cu_seqlens_q`; LSE is the natural logarithm, float32,
  [B, Hq, Tq] or [Hq, total].
- `causal`, the window and the chunk count positions from the end of a request's keys: its last
  query stands at its last key.
- A row without keys has output 0. With sinks its LSE is the sink where others of its block have
  keys, here of its request; where none has any, LSE is -inf.
- Rows of Q that no request owns are not computed: `out` keeps what it held.
- Q, K and V are of one dtype. With float8_e4m3fn the output is bfloat16, the softmax's weights are
  rounded to float8_e4m3fn too, and the descales [B, Hkv] multiply.
- With `qv`, of V's dims, a logit is q · k + qv · v, and the scale defaults to that of both dims.
- Without any keys, an empty K and V, LSE is +inf.
- `flash_attn_varlen_func` ignores `page_table`.
- K that nobody sees does not matter, whatever it holds. V does where it is not finite: the kernel
  multiplies whole blocks by weights of 0. So it is with V before a window, behind a request's end
  in a page of a block or more, and of the packed requests behind. Smaller pages are read up to the
  end. Here every block counts.
- More than 64 sinks are written behind the array that the kernels have for them.
- A launch that fails ends the process. Here it raises RuntimeError.
- `scheduler_metadata` of another step or of other arguments gives garbage, here NaN.
- `merge_state_v2` reads outputs and LSE [T, H] as if they lay end to end; where neither side has
  keys it gives NaN.

Shapes are static and nothing is read on the host.
"""

from attnmux.emulators.nvidia.sgl_flash_attn.functions import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from attnmux.emulators.nvidia.sgl_flash_attn.merging import merge_state_v2
from attnmux.emulators.nvidia.sgl_flash_attn.scheduling import get_scheduler_metadata

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "merge_state_v2",
]
