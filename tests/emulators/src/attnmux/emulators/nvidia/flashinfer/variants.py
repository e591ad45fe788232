"""Kernels that are compiled with another softmax: `jit_args` of the paged wrapper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attnmux.emulators.nvidia.flashinfer.arguments import dtype_of

attention_sink_decl = {
    "fa2": "struct AttentionSink : AttentionVariantBase {};",
    "fa3": "template <int NUM_ROWS_PER_THREAD> struct OnlineSoftmaxWithSink {};",
}
"""The library's source by backend; the emulator knows it by its name alone."""


def get_batch_prefill_attention_sink_uri(
    backend: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    dtype_o: torch.dtype,
    dtype_idx: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    pos_encoding_mode: int,
    use_sliding_window: bool,
) -> str:
    """A name for the compiled module, one for each that differs."""
    built_for = backend, dtype_q, dtype_kv, dtype_o, dtype_idx, head_dim_qk, head_dim_vo
    return "_".join(map(str, (*built_for, pos_encoding_mode, use_sliding_window))).replace(".", "_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A module of `gen_customize_batch_prefill_module`, with the softmax that knows sinks."""

    heads: tuple[int, int]
    dtypes: tuple[torch.dtype, torch.dtype]
    windowed: bool

    def check(
        self,
        heads: tuple[int, int, int, int],
        dtypes: tuple[torch.dtype, torch.dtype],
        window_left: int,
    ) -> None:
        """The library looks at none of these: it reads what it was compiled for."""
        planned = heads[2:], dtypes, window_left >= 0
        if planned != (self.heads, self.dtypes, self.windowed):
            raise ValueError(f"planned for {planned}, compiled for {self}")


def variant_of(
    backend: str, jit_args: list[Any] | None, jit_kwargs: dict[str, Any] | None
) -> Variant | None:
    """None without `jit_args`."""
    if jit_args is None:
        return None
    if backend == "auto":
        raise ValueError("backend should not be auto when jit_args is provided")
    _, dtype_q, dtype_kv, dtype_o, dtype_idx, dim_qk, dim_vo, *softmax = jit_args
    known = [["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink"]
    if backend != "fa2" or softmax != [*known, attention_sink_decl["fa2"]]:
        raise NotImplementedError("the emulator has sinks in fa2 alone")
    if (dtype_o, dtype_idx) != (dtype_q, torch.int32):
        raise NotImplementedError("the emulator writes the dtype of Q, and has indices in int32")
    return Variant(
        heads=(dim_qk, dim_vo),
        dtypes=(dtype_of(dtype_q), dtype_of(dtype_kv)),
        windowed=(jit_kwargs or {}).get("use_sliding_window", False),
    )
