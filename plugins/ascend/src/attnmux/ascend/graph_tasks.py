"""Calls of `npu_fused_infer_attention_score_v2` in graphs of an NPU, whose lengths are renewed.

The operator takes lengths as lists on the host, which a captured graph keeps. A call is captured as
a group of tasks, which `torch.npu.graph_task_update_begin` and `_end` replace before a replay: the
operator is called again with the same tensors and other lists. The graph waits for an event that
follows. torch-npu does the same in `NPUGraph.update`, for graphs that it captured itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

Results = tuple[torch.Tensor, torch.Tensor]
"""The operator's: the result, and its LSE or a dummy."""
OUTPUT_ARGUMENTS = (
    *("input_layout", "block_table", "num_query_heads", "num_key_value_heads"),
    "return_softmax_lse",
)
"""Arguments that the shapes of its results follow from."""


class GraphTasks(Protocol):
    """How calls are captured, and renewed later."""

    def record(self, arguments: dict[str, Any]) -> tuple[Results, Any]:
        """Call the operator. Returns its results, and a task if a graph is being captured."""

    def renew(self, task: Any, new_ends: list[int], key_lens: list[int]) -> None:  # noqa: ANN401  # of `record`
        """Replace the lengths of a captured call: `actual_seq_qlen` and `actual_seq_kvlen`."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NPUTask:
    """A captured call."""

    handle: object
    event: Any
    arguments: dict[str, Any]
    """Arguments of the operator's variant `out`."""


class NPUGraphTasks:
    """Graph tasks of torch-npu."""

    def __init__(self) -> None:
        """Raises ImportError if torch-npu is missing."""
        self._torch_npu = import_module("torch_npu")
        self._npu = self._torch_npu.npu
        self._stream: Any = None

    def record(self, arguments: dict[str, Any]) -> tuple[Results, NPUTask | None]:
        library, npu = self._torch_npu, self._npu
        operator = library.npu_fused_infer_attention_score_v2
        if not npu.is_current_stream_capturing():
            return operator(**arguments), None
        stream, event = npu.current_stream(), npu.ExternalEvent()
        event.wait(stream)
        event.reset(stream)
        out, lse = library._npu_fused_infer_attention_score_v2_infer_output(
            arguments["query"],
            arguments["value"],
            **{name: arguments[name] for name in OUTPUT_ARGUMENTS if name in arguments},
        )
        workspace = library._npu_fused_infer_attention_score_v2_get_max_workspace(**arguments)
        whole = {**arguments, "workspace": workspace, "out": [out, lse]}
        npu.graph_task_group_begin(stream)
        operator.out(**whole)
        handle = npu.graph_task_group_end(stream)
        return (out, lse), NPUTask(handle=handle, event=event, arguments=whole)

    def renew(self, task: NPUTask, new_ends: list[int], key_lens: list[int]) -> None:
        npu = self._npu
        if self._stream is None:
            self._stream = npu.Stream()
        stream = self._stream
        # The last replay may still read the lengths
        stream.wait_stream(npu.current_stream())
        lens = {"actual_seq_qlen": new_ends, "actual_seq_kvlen": key_lens}
        with npu.stream(stream):
            npu.graph_task_update_begin(stream, task.handle)
            self._torch_npu.npu_fused_infer_attention_score_v2.out(**{**task.arguments, **lens})
            npu.graph_task_update_end(stream)
            task.event.record(stream)
