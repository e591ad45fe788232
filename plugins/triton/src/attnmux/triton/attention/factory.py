"""Builds the backend: the one module that asks Triton about a device."""

from __future__ import annotations

from collections.abc import Mapping

import triton as library
from triton.runtime import driver

from attnmux.core import AttnmuxError, BackendContext, BackendFailed, TunedLaunch
from attnmux.core.plugin import rehearse as rehearse_all
from attnmux.triton.attention.backend import TritonBackend
from attnmux.triton.attention.picked import PickedBackend
from attnmux.triton.attention.warmup import compile_ahead, rehearse
from attnmux.triton.launches.config_tables import ConfigTables

ADDRESS = "triton/triton"
"""The backend's name in `TunedLaunch.backend`."""


def triton(context: BackendContext, options: Mapping[str, object]) -> TritonBackend | PickedBackend:
    """Compiles the layers' kernels, so that no request waits for a compiler.

    Raises InvalidInput for layers that the kernels do not serve, BackendFailed if this Triton
    cannot drive the device or a kernel does not compile for it.
    """
    if context.request.kind == "nsa":
        return _picked(context, options)
    tuned = TunedLaunch.current(context.launches, ADDRESS, context.platform)
    backend = TritonBackend(
        context,
        options,
        compute_units=compute_units(context),
        tables=ConfigTables.of(tuned, context.platform.arch),
    )
    if not library.knobs.runtime.interpret:
        compile_ahead(backend.launcher.rehearse(lambda: rehearse(backend, context)), context.device)
    return backend


def _picked(context: BackendContext, options: Mapping[str, object]) -> PickedBackend:
    backend = PickedBackend(context, options, compute_units=compute_units(context))
    if not library.knobs.runtime.interpret:
        rehearse_all(backend)
    return backend


def compute_units(context: BackendContext) -> int:
    """The platform's `core_count`; if it has none, that of the device that Triton drives."""
    units = context.platform.core_count
    if not library.knobs.runtime.interpret:
        try:
            device = driver.active.get_active_torch_device()
        except RuntimeError as error:
            why = AttnmuxError.in_brief(error)
            reason = f"Triton {library.__version__} drives no device here: {why}"
            raise BackendFailed("triton", reason) from error
        if device.type != context.device.type:
            raise BackendFailed(
                "triton",
                f"Triton {library.__version__} drives {device.type}, not {context.device}",
            )
        if not units:
            facts = driver.active.utils.get_device_properties(context.device.index or 0)
            units = int(facts["multiprocessor_count"])
    return units or 1
