"""Graphs for machines without a device that has them: a step's operations, noted and run again.

A replay repeats the operations with the arguments of the capture, so that a number that was read
on the host stays what it was, as in a device graph. What a device would refuse, or would get
wrong in silence, is refused: see `recorder.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils import _pytree as pytree

from attnmux.core.errors import GraphViolation
from attnmux.core.graph.devices import CapturedGraph, DeviceGraphs, GraphStep
from attnmux.core.graph.tape import Tape
from attnmux.testing.host_reads import HostReads
from attnmux.testing.recorder import Recorder

PREPARE, FORWARD = "init_forward_metadata_in_graph", "forward"


class RecordedGraph(CapturedGraph):
    """A tape of operations, and the outputs that they write."""

    def __init__(self, tape: Tape, outputs: object, *, inference: bool) -> None:
        self.outputs = outputs
        self.nbytes = tape.nbytes
        self._tape = tape
        self._inference = inference

    def replay(self) -> None:
        """Run the operations again. Raises GraphViolation where a tensor that they read is gone."""
        with torch.inference_mode(self._inference), torch.no_grad():
            self._tape.run()


class RecordingGraphs(DeviceGraphs):
    """Graphs for tests: any device, no kernel launched from anything but torch operations.

    Compiled functions run eagerly meanwhile, and `attnmux::attention_with_output` is looked into;
    other custom operations are repeated whole. Every temporary stays allocated.
    """

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def warm_up(self, step: GraphStep) -> None:
        step.run()

    def capture(self, step: GraphStep) -> CapturedGraph:
        """Run the step and note what it does.

        Raises GraphViolation where it synchronises, has shapes that depend on values, reads the
        host's tensors, or allocates while it prepares metadata.
        """
        tape = Tape()
        with torch.compiler.set_stance("force_eager"):
            with HostReads(PREPARE), Recorder(tape, PREPARE, step.host_tensors):
                step.prepare()
            for maker, tensor in tape.held_elsewhere():
                raise GraphViolation(
                    PREPARE,
                    maker,
                    f"allocates {tensor.nbytes} bytes that are kept",
                    hint="write to buffers that init_cuda_graph_state made: out=, copy_",
                )
            with HostReads(FORWARD), Recorder(tape, FORWARD, step.host_tensors):
                outputs = step.forward()
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and not tape.knows(leaf):
                raise GraphViolation(
                    FORWARD, "the output", "was made by no recorded torch operation"
                )
        return RecordedGraph(tape, outputs, inference=torch.is_inference_mode_enabled())
