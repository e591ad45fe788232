"""What every adapter asks of a step before it uses one."""

from __future__ import annotations

from typing import TypeVar

from attnmux.core.batch import ForwardBatch
from attnmux.core.errors import AttnmuxError, GraphUnsupported

T = TypeVar("T")


def prepared(step: T | None) -> T:
    """What was prepared for the step. Raises AttnmuxError where nothing was."""
    if step is None:
        raise AttnmuxError("no step is prepared: call init_forward_metadata(batch) first")
    return step


def check_room(batch: ForwardBatch, max_batch_size: int) -> None:
    """Raises GraphUnsupported for a captured batch of more requests than there are buffers for."""
    if batch.batch_size > max_batch_size:
        raise GraphUnsupported(
            f"a batch of {batch.batch_size} is captured with buffers for {max_batch_size}: call "
            "init_cuda_graph_state with the largest first"
        )
