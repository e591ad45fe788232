"""Calls in graphs whose lengths are renewed: an operator whose lists a table replaces.

A recorded call repeats with the lists of its capture, as on a device, unless they were renewed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library

from attnmux.emulators.ascend import fused_infer

NAME = "npu_fused_infer_attention_score_v2_task"


class EmulatedTasks:
    """Implements `GraphTasks`. A call that no graph records makes a task that nothing replays."""

    def __init__(self, library: Library) -> None:
        """Defines the operator in the library."""
        self._renewed: dict[int, dict[str, list[int]]] = {}
        self._made = 0
        library.define(f"{NAME}(int task, " + fused_infer.SCHEMA[1:])  # type: ignore[no-untyped-call]  # torch's
        library.impl(NAME, self._run, "CPU")  # type: ignore[no-untyped-call]  # torch's
        self._operator = getattr(getattr(torch.ops, library.ns), NAME)

    def record(self, arguments: dict[str, Any]) -> tuple[tuple[torch.Tensor, torch.Tensor], int]:
        self._made += 1
        return self._operator(self._made, **arguments), self._made

    def renew(self, task: int, new_ends: list[int], key_lens: list[int]) -> None:
        self._renewed[task] = {"actual_seq_qlen": new_ends, "actual_seq_kvlen": key_lens}

    def _run(
        self,
        task: int,
        *tensors: torch.Tensor,
        **arguments: Any,  # noqa: ANN401  # the operator's
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given = {**arguments, **self._renewed.get(task, {})}
        return fused_infer.emulated(*tensors, **given)
