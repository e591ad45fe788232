"""torch-npu's operators without the NPU that they need, under its own schemas."""

from __future__ import annotations

import torch
from torch.library import Library

from attnmux.ascend import NPUKernels
from attnmux.emulators.ascend import fused_infer, paged_attention, ring_mla
from attnmux.emulators.ascend.graph_tasks import EmulatedTasks

OPERATORS = {
    "npu_fused_infer_attention_score_v2": (fused_infer.SCHEMA, fused_infer.emulated),
    "_npu_paged_attention_mla": (paged_attention.SCHEMA, paged_attention.emulated),
    "npu_ring_mla": (ring_mla.SCHEMA, ring_mla.emulated),
}

library = Library("attnmux_npu_emulated", "DEF")  # type: ignore[no-untyped-call]  # torch's
for name, (schema, function) in OPERATORS.items():
    library.define(name + schema)  # type: ignore[no-untyped-call]  # torch's
    library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]  # torch's

KERNELS = NPUKernels(
    fused_infer_attention_score=torch.ops.attnmux_npu_emulated.npu_fused_infer_attention_score_v2,
    paged_attention_mla=torch.ops.attnmux_npu_emulated._npu_paged_attention_mla,
    ring_mla=torch.ops.attnmux_npu_emulated.npu_ring_mla,
    graph_tasks=EmulatedTasks(library),
)
