"""When the planner's host memory may be written again."""

from __future__ import annotations

import torch


class Staging:
    """Plans on their way from the host to the device.

    The library's planner writes a plan to pinned memory of the wrapper and queues a copy to the
    device (`cudaMemcpyAsync` in scheduler.cuh). Given lengths on the host, `plan` waits for
    nothing: a step that is prepared while the device is still two steps behind, as in a long
    prompt's chunks, would overwrite plans that are yet to be copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own

    def wait(self) -> None:
        """Before a step is planned: until the plans of the one before were copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def mark(self) -> None:
        """After plans were made."""
        if self._copied is not None:
            self._copied.record()
