"""The layers for which vllm-xpu-kernels has compiled both a prefill and a decode kernel over pages.

For others its function falls back to plain torch without an error, or raises in steps of few
queries. Read from the symbols of `libattn_kernels_xe_2.so` and `_xe_3.so`, version 0.1.16.2.
"""

from __future__ import annotations

from dataclasses import dataclass

PAGE_STEP = 64
"""Pages are multiples of it; few decode kernels exist for pages of 16 and 32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """Dims of heads that share limits."""

    head_dims: tuple[int, ...]
    """Dims of K and V alike, the usual one first."""
    most_group: int
    """Query heads a KV head."""
    windows: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        dims = " or ".join(map(str, self.head_dims))
        also = {" windows": self.windows, " sinks": self.sinks}
        more = " and".join(name for name, is_set in also.items() if is_set)
        return f"dims of {dims}, groups of {self.most_group}{',' + more if more else ''}"


SHAPES = (
    Shapes(head_dims=(128, 64, 256), most_group=16),
    Shapes(head_dims=(96, 192, 512), most_group=8),
    Shapes(head_dims=(128,), most_group=16, windows=True),
    Shapes(head_dims=(64, 96, 256), most_group=8, windows=True),
    Shapes(head_dims=(128,), most_group=8, sinks=True),
    Shapes(head_dims=(64,), most_group=8, windows=True, sinks=True),
)
