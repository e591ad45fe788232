"""Graphs for machines without a device that has them: a step's operations, recorded and repeated.

A replay repeats the operations with the arguments of the capture, so that a number which was read
on the host keeps its value, as in a device graph. A step that a device would refuse, or would
replay wrongly without an error, is refused; see `recorder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from attnmux.core import DeviceGraphs
from attnmux.core.plugin import CapturedGraph, GraphStep
from attnmux.testing.graphs.recorder import Recorder
from attnmux.testing.graphs.tape import GraphViolation, Tape

PREPARE, FORWARD = "init_forward_metadata_in_graph", "forward"


class RecordingGraphs(DeviceGraphs):
    """Graphs for tests on any device, of steps whose kernels are all torch operations.

    During a capture compiled functions run eagerly. `attnmux::attention_with_output` is recorded as
    its parts, other custom operations as one. Every temporary stays allocated.
    """

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def warm_up(self, step: GraphStep) -> None:
        step.run()

    def capture(self, step: GraphStep) -> CapturedGraph:
        """Run the step and record its operations. A replay runs them again, and raises
        GraphViolation if a tensor that they read is gone.

        Raises GraphViolation if it synchronises, has shapes that depend on values, reads the
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
        return CapturedGraph(outputs=outputs, nbytes=tape.nbytes, replay=_replaying(tape))

    @contextmanager
    def piece(self) -> Iterator[CapturedGraph]:
        tape = Tape()
        piece = CapturedGraph(replay=_replaying(tape))
        with (
            torch.compiler.set_stance("force_eager"),
            HostReads(FORWARD),
            Recorder(tape, FORWARD, ()),
        ):
            yield piece
        piece.nbytes = tape.nbytes

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _replaying(tape: Tape) -> Callable[[], None]:
    """Runs the operations of a tape in the mode of the capture."""
    inference = torch.is_inference_mode_enabled()

    def replay() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            tape.run()

    return replay


_READS: Mapping[object, str] = MappingProxyType(
    {
        getattr(torch.Tensor, name): name
        for name in (
            "cpu",
            "item",
            "tolist",
            "numpy",
            "__bool__",
            "__int__",
            "__float__",
            "__index__",
            "__contains__",
            "__array__",
        )
    }
)


class HostReads(TorchFunctionMode):
    """Refuses reads of tensors by the host. On a CPU torch dispatches no operation for them."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self._method = method

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401  # whatever the function returns
        """Raises GraphViolation for a read of the tensor's values."""
        name = _READS.get(func)
        if name is not None:
            raise GraphViolation(
                self._method,
                f"Tensor.{name}",
                "synchronises with the device",
                hint="read values on the host in init_forward_metadata_out_graph",
            )
        return func(*args, **(kwargs or {}))
