"""Builds the backend: the one place that asks Triton about a device."""

from __future__ import annotations

from collections.abc import Mapping

from triton.runtime import driver

from attnmux.core.backend import BackendContext
from attnmux.triton.backend import TritonBackend


def triton(context: BackendContext, options: Mapping[str, object]) -> TritonBackend:
    """Raises InvalidInput for layers that the kernels do not serve."""
    units = context.platform.core_count
    if not units:
        facts = driver.active.utils.get_device_properties(context.device.index or 0)
        units = facts["multiprocessor_count"]
    return TritonBackend(context, options, compute_units=units)
