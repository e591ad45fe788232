"""The names of `torch_npu` that attnmux-ascend uses, on a CPU: its operators, and its graphs, which
are recordings.

A graph waits in each replay until its groups of tasks were renewed, which an NPU would do for ever:
here a replay raises. A captured call keeps its lengths until they are renewed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from attnmux.emulators.ascend import KERNELS
from attnmux.testing import FORWARD, HostReads, Recorder, Tape


class NPUStream:
    """A stream of an NPU. What is queued is done at once."""

    def wait_stream(self, other: NPUStream) -> None:
        """Nothing: the other has no work left."""


class RecordedGraph:
    """A recording, and the events that each replay waits for."""

    def __init__(self) -> None:
        self.tape = Tape()
        self.events: list[NPUEvent] = []

    def replay(self) -> None:
        """Raises RuntimeError where an NPU would wait for ever."""
        for event in self.events:
            if not event.is_recorded:
                raise RuntimeError("the graph waits for tasks that nothing renewed")
            event.is_recorded = False
        with torch.no_grad():
            self.tape.run()


class NPUEvent:
    """An event that is recorded outside of the graph that waits for it."""

    def __init__(self, npu: NPU) -> None:
        self._npu = npu
        self.is_recorded = False

    def wait(self, stream: NPUStream) -> None:
        assert self._npu.graph_captured is not None, "only a graph waits"
        self._npu.graph_captured.events.append(self)

    def reset(self, stream: NPUStream) -> None:
        """Part of each replay."""

    def record(self, stream: NPUStream) -> None:
        self.is_recorded = True


class NPU:
    """`torch_npu.npu`."""

    NPUGraph = RecordedGraph

    def __init__(self) -> None:
        self.graph_captured: RecordedGraph | None = None
        self.group: list[int] | None = None
        """Tasks of the group that is being captured."""
        self.renewed: int | None = None
        """The task that is being renewed."""
        self._current = NPUStream()

    def Stream(self, device: torch.device | None = None) -> NPUStream:
        return NPUStream()

    def ExternalEvent(self) -> NPUEvent:
        return NPUEvent(self)

    def current_stream(self, device: torch.device | None = None) -> NPUStream:
        return self._current

    def graph_pool_handle(self) -> tuple[int, int]:
        return 0, 1

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 0, 0

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def synchronize(self, device: torch.device) -> None:
        """Nothing is queued."""

    def is_current_stream_capturing(self) -> bool:
        return self.graph_captured is not None

    @contextmanager
    def stream(self, stream: NPUStream) -> Iterator[None]:
        yield

    @contextmanager
    def graph(
        self,
        graph: RecordedGraph,
        *,
        pool: tuple[int, int],
        stream: NPUStream,
        capture_error_mode: str,
    ) -> Iterator[None]:
        self.graph_captured = graph
        try:
            with (
                torch.compiler.set_stance("force_eager"),
                HostReads(FORWARD),
                Recorder(graph.tape, FORWARD, ()),
            ):
                yield
        finally:
            self.graph_captured = None

    def graph_task_group_begin(self, stream: NPUStream) -> None:
        assert self.graph_captured is not None, "no graph is being captured"
        assert self.group is None, "a group is open"
        self.group = []

    def graph_task_group_end(self, stream: NPUStream) -> int:
        assert self.group is not None, "no group is open"
        ((task,), self.group) = self.group, None
        return task

    def graph_task_update_begin(self, stream: NPUStream, handle: int) -> None:
        assert self.graph_captured is None, "a graph is being captured"
        self.renewed = handle

    def graph_task_update_end(self, stream: NPUStream) -> None:
        self.renewed = None


class FusedInfer:
    """`npu_fused_infer_attention_score_v2`, with its variant `out`."""

    def __init__(self, npu: NPU) -> None:
        self._npu = npu

    def __call__(
        self,
        *tensors: torch.Tensor,
        **arguments: Any,  # noqa: ANN401  # the operator's
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return KERNELS.fused_infer_attention_score(*tensors, **arguments)

    def out(
        self,
        *,
        workspace: torch.Tensor,
        out: list[torch.Tensor],
        **arguments: Any,  # noqa: ANN401  # the operator's
    ) -> None:
        npu, tasks = self._npu, KERNELS.graph_tasks
        if npu.renewed is not None:
            tasks.renew(npu.renewed, arguments["actual_seq_qlen"], arguments["actual_seq_kvlen"])
            return
        results, task = tasks.record(arguments)
        if npu.group is not None:
            npu.group.append(task)
        for given, result in zip(out, results, strict=True):
            given.copy_(result)


def torch_npu() -> ModuleType:
    """The module, for `sys.modules`."""
    module, npu = ModuleType("torch_npu"), NPU()
    prefix = "npu_fused_infer_attention_score_v2"
    vars(module).update(
        {
            "npu": npu,
            prefix: FusedInfer(npu),
            f"_{prefix}_infer_output": _results,
            f"_{prefix}_get_max_workspace": lambda **arguments: arguments["query"].new_empty(1),
            "_npu_paged_attention_mla": KERNELS.paged_attention_mla,
            "atb": SimpleNamespace(npu_ring_mla=KERNELS.ring_mla),
        }
    )
    return module


def _results(
    query: torch.Tensor,
    value: torch.Tensor,
    *,
    input_layout: str,
    block_table: torch.Tensor | None = None,
    num_query_heads: int = 1,
    num_key_value_heads: int = 0,
    return_softmax_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the operator's results in layout TND."""
    assert input_layout == "TND"
    dim = value.shape[-1] if block_table is None else value.shape[-1] // num_key_value_heads
    rows = len(query)
    lse = (rows, num_query_heads, 1) if return_softmax_lse else (1,)
    return query.new_empty(rows, num_query_heads, dim), query.new_empty(lse, dtype=torch.float32)
