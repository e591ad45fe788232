"""Builds the backend: the one place that asks Triton about the device."""

from __future__ import annotations

from collections.abc import Mapping

from triton.runtime import driver

from attnmux.core.backend import BackendContext
from attnmux.triton.backend import TritonBackend


def triton(context: BackendContext, options: Mapping[str, object]) -> TritonBackend:
    """Raises InvalidInput for layers that the kernels do not serve."""
    index = context.device.index or 0
    facts = driver.active.utils.get_device_properties(index)
    return TritonBackend(context, options, compute_units=facts["multiprocessor_count"])
