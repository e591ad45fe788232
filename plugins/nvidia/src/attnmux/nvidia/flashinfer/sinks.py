"""Attention sinks: the paged kernels of fa2, compiled with another softmax.

The library has that softmax as source (`attention_sink_fa2_decl`). It adds the sink to a row's sum
in the first part of the keys alone, and to LSE with it; a row without keys has output 0 and the
sink as LSE. It looks at windows and causality, not at custom masks, items or the logit cap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnmux.core.errors import InvalidInput
from attnmux.nvidia.flashinfer.groups import PlanGroup
from attnmux.nvidia.flashinfer.kernels import Kernels
from attnmux.nvidia.flashinfer.settings import Settings

BACKEND = "fa2"

NO_POSITIONS = 0
"""`PosEncodingMode.NONE`."""


def check_sinks(kernels: Kernels, groups: Sequence[PlanGroup]) -> None:
    """Raises InvalidInput for layers whose sinks no kernel serves."""
    of_sinks = [group for group in groups if group.has_sinks]
    if of_sinks and kernels.sinks is None:
        raise InvalidInput("layer.sinks", came="sinks", expected="None: these kernels have none")
    for group in of_sinks:
        if group.logit_cap > 0:
            raise InvalidInput(
                "layer.logit_cap",
                came=f"{group.logit_cap:g} beside sinks",
                expected="0: flashinfer's softmax with sinks has no cap",
            )


def jit_arguments(kernels: Kernels, group: PlanGroup, settings: Settings) -> dict[str, Any]:
    """Arguments that a paged wrapper is made with, none for layers without sinks.

    `BatchAttentionWithAttentionSinkWrapper` does the same, but its name for the compiled module has
    neither head dims nor the dtype of K and V: two models would compile over each other.
    """
    if not group.has_sinks or kernels.sinks is None:
        return {}
    windowed = group.window >= 0
    built_for = (
        settings.dtype, settings.kv_dtype, settings.dtype, torch.int32,
        group.head_dim, group.v_head_dim,
    )  # fmt: skip
    name = kernels.sinks.module_name(BACKEND, *built_for, NO_POSITIONS, windowed)
    softmax = ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", kernels.sinks.source
    return {
        "jit_args": [name, *built_for, *softmax],
        "jit_kwargs": {"use_sliding_window": windowed},
    }
