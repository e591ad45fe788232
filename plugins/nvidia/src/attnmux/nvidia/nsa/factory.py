"""Where the card's factory stands: the one module that imports the kernel library."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from attnmux.core.backend import BackendContext
from attnmux.core.errors import BackendFailed, in_brief
from attnmux.nvidia.nsa.backend import NSABackend
from attnmux.nvidia.nsa.providers import PROVIDERS
from attnmux.nvidia.nsa.trial import measured_lse_unit


def make(context: BackendContext, options: Mapping[str, object]) -> NSABackend:
    """The backend on the first package that is installed and runs on the context's device.

    Raises BackendFailed where none does, with what each said.
    """
    reasons: list[str] = []
    for module, provide in PROVIDERS.items():
        try:
            kernels = provide(import_module(module))
            lse_unit = measured_lse_unit(kernels, context)
        except (ImportError, OSError) as error:
            reasons.append(f"{module}: {in_brief(error)}")
        except BackendFailed as error:
            reasons.append(f"{module}: {error.reason}")
        else:
            return NSABackend(context, options, kernels, lse_unit=lse_unit)
    raise BackendFailed("nvidia/nsa", "; ".join(reasons))
