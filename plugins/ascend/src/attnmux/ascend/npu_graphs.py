"""Graphs of NPUs, for a `GraphRunner`: torch-npu's `NPUGraph`, which captures into an ACL graph."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from attnmux.core import StreamGraphs


class NPUGraphs(StreamGraphs):
    """Pass it to a runner: `GraphRunner(backend, forward, config, devices=NPUGraphs(device))`.

    Never run on a device. A replay waits until the backend has renewed its lengths, which it does
    in `init_forward_metadata_out_graph`; the runner calls that before each replay.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises ImportError where torch-npu is missing."""
        npu: Any = import_module("torch_npu").npu
        super().__init__(device, npu, npu.NPUGraph)
