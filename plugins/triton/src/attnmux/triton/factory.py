"""Builds the backend: the one place that asks Triton about a device."""

from __future__ import annotations

from collections.abc import Mapping

import triton as library
from triton.runtime import driver

from attnmux.core.context import BackendContext
from attnmux.core.errors import BackendFailed, in_brief
from attnmux.triton.backend import TritonBackend
from attnmux.triton.compiling import compile_ahead
from attnmux.triton.own_launches import own_launches
from attnmux.triton.rehearsal import rehearse


def triton(context: BackendContext, options: Mapping[str, object]) -> TritonBackend:
    """Compiles what the layers will need, so that no request waits for a compiler.

    Raises InvalidInput for layers that the kernels do not serve, BackendFailed where this Triton
    cannot drive the device or a kernel does not compile for it.
    """
    backend = TritonBackend(
        context,
        options,
        compute_units=compute_units(context),
        launches=own_launches(context.platform),
    )
    if not library.knobs.runtime.interpret:
        compile_ahead(backend.launcher.rehearse(lambda: rehearse(backend, context)), context.device)
    return backend


def compute_units(context: BackendContext) -> int:
    """Of the platform, where it says so, else of what Triton drives."""
    units = context.platform.core_count
    if not library.knobs.runtime.interpret:
        try:
            found = driver.active.get_active_torch_device()
        except RuntimeError as error:
            reason = f"Triton {library.__version__} drives no device here: {in_brief(error)}"
            raise BackendFailed("triton", reason) from error
        if found.type != context.device.type:
            raise BackendFailed(
                "triton",
                f"Triton {library.__version__} drives {found.type}, not {context.device}",
            )
        if not units:
            facts = driver.active.utils.get_device_properties(context.device.index or 0)
            units = int(facts["multiprocessor_count"])
    return units or 1
