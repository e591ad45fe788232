"""Graphs of NPUs: torch-npu's `NPUGraph`, which captures into an ACL graph.

The entry point `npu` of the group `attnmux.graphs` names the class.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from attnmux.core.plugin import CapturedGraph, GraphStep, StreamGraphs


class NPUGraphs(StreamGraphs):
    """The graphs of an NPU, which `DeviceGraphs.of` makes.

    Never run on a device. A replay waits until the backend has renewed its lengths, which it does
    in `init_forward_metadata_out_graph`; the runner calls that before each replay.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises ImportError if torch-npu is missing."""
        npu: Any = import_module("torch_npu").npu
        super().__init__(device, npu, npu.NPUGraph)

    def capture(self, step: GraphStep) -> CapturedGraph:
        """A graph that waits in each replay for lengths that were not there in the one before."""
        return replace(super().capture(step), repeats=False)
