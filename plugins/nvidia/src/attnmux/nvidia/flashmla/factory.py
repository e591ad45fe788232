"""Where the card's factory stands: the one module that imports the kernel library."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from attnmux.core.backend import BackendContext
from attnmux.core.errors import BackendFailed, in_brief
from attnmux.nvidia.flashmla.backend import FlashMLABackend
from attnmux.nvidia.flashmla.providers import PROVIDERS
from attnmux.nvidia.flashmla.trial import try_kernels


def make(context: BackendContext, options: Mapping[str, object]) -> FlashMLABackend:
    """The backend on the first package that is installed and runs on the context's device.

    Raises BackendFailed where none does, with what each said.
    """
    reasons: list[str] = []
    for module, provide in PROVIDERS.items():
        try:
            kernels = provide(import_module(module))
            try_kernels(kernels, context)
        except (ImportError, OSError) as error:
            reasons.append(f"{module}: {in_brief(error)}")
        except BackendFailed as error:
            reasons.append(f"{module}: {error.reason}")
        else:
            return FlashMLABackend(context, options, kernels)
    raise BackendFailed("nvidia/flashmla", "; ".join(reasons))
