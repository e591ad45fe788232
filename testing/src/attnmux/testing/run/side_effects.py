"""Compares the state of the process before and after a backend's work."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from attnmux.testing.run.comparison import Disagreement
from attnmux.testing.run.process_probes import PROCESS_PROBES, SHARED_VARIABLES
from attnmux.testing.run.torch_probes import DEVICE_PROBES, TORCH_PROBES


class SideEffects:
    """The state before a backend's work.

    The state after each part of the work is the one before the next, so that in between nothing
    else may change it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        of_device = () if device.type == "cpu" else DEVICE_PROBES
        self._probes = (*TORCH_PROBES, *PROCESS_PROBES, *of_device)
        self._values = [probe.read(device) for probe in self._probes]

    @contextmanager
    def watch(self, work: str) -> Iterator[None]:
        """Run a block, and set the state back that it changed, as far as Python can.

        Raises Disagreement if the block, which does the named work, changed any.
        """
        try:
            yield
        finally:
            faults = list(self._set_back())
        if faults:
            raise Disagreement(f"{work} changed {'; and '.join(faults)}")

    def _set_back(self) -> Iterator[str]:
        """Yield what changed, what was expected, and the remedy."""
        for index, probe in enumerate(self._probes):
            before, after = self._values[index], probe.read(self._device)
            words = None if before is None else _difference(probe.view(before), probe.view(after))
            if words is not None:
                yield f"{probe.name}: expected {words[0]} as before, got {words[1]}; {probe.remedy}"
            if words is not None and probe.restore is not None:
                probe.restore(before, self._device)
            else:
                self._values[index] = after


def _difference(before: Any, after: Any) -> tuple[str, str] | None:  # noqa: ANN401  # of any probe
    """Both values in words, as far as they differ; None for equal ones.

    A new key of a mapping counts only if it is a variable that others read: a library that is
    imported or compiles sets some of its own.
    """
    if isinstance(before, torch.Tensor):
        return None if torch.equal(before, after) else ("the state", "another one")
    if isinstance(before, Mapping) and before != after:
        names = {name for name in before if before[name] != after.get(name)}
        names |= {name for name in after if name not in before and SHARED_VARIABLES.search(name)}
        before, after = (
            {name: values[name] for name in sorted(names) if name in values}
            for values in (before, after)
        )
    if before == after:
        return None
    words = reprlib.repr(before), reprlib.repr(after)
    return ("the state", "another one") if words[0] == words[1] else words
