"""Graphs of NPUs, for a `GraphRunner`: torch-npu's `NPUGraph`, which captures into an ACL graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from attnmux.core import DeviceGraphs, GraphUnsupported
from attnmux.core.graph.devices import CapturedGraph, GraphStep


class NPUGraphs(DeviceGraphs):
    """Pass it to a runner: `GraphRunner(backend, forward, config, devices=NPUGraphs(device))`.

    Never run on a device. A replay waits until the backend has renewed its lengths, which it does
    in `init_forward_metadata_out_graph`; the runner calls that before each replay.
    """

    def __init__(self, device: torch.device) -> None:
        """Raises ImportError where torch-npu is missing."""
        self._npu: Any = import_module("torch_npu").npu
        self._device = device
        self._stream = self._npu.Stream(device)
        self._pool = self._npu.graph_pool_handle()

    @contextmanager
    def session(self) -> Iterator[None]:
        current = self._npu.current_stream(self._device)
        self._stream.wait_stream(current)
        gc.collect()
        was_enabled = gc.isenabled()
        # A graph that is collected during a capture frees memory, which invalidates the capture
        gc.disable()
        try:
            with self._npu.stream(self._stream):
                yield
        finally:
            if was_enabled:
                gc.enable()
            current.wait_stream(self._stream)

    def warm_up(self, step: GraphStep) -> None:
        self._npu.synchronize(self._device)
        step.run()
        self._npu.synchronize(self._device)

    def capture(self, step: GraphStep) -> CapturedGraph:
        npu, graph = self._npu, self._npu.NPUGraph()
        npu.empty_cache()
        free, _ = npu.mem_get_info(self._device)
        try:
            with npu.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                # Other threads go on using the device
                capture_error_mode="thread_local",
            ):
                outputs = step.run()
        except RuntimeError as error:
            raise GraphUnsupported(f"the step cannot be captured: {error}") from error
        left, _ = npu.mem_get_info(self._device)
        return CapturedGraph(outputs=outputs, nbytes=max(free - left, 0), replay=graph.replay)
