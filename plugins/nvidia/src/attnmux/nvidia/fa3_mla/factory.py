"""Where the card's factory stands: on the library as `fa3` imports it."""

from __future__ import annotations

from collections.abc import Mapping

from attnmux.core.context import BackendContext
from attnmux.nvidia.fa3.factory import KERNELS
from attnmux.nvidia.fa3_mla.backend import FA3MLABackend
from attnmux.nvidia.fa3_mla.trial import try_kernels


def make(context: BackendContext, options: Mapping[str, object]) -> FA3MLABackend:
    """The backend on the installed library.

    Raises BackendFailed where its kernels do not run on the context's device.
    """
    try_kernels(KERNELS, context)
    return FA3MLABackend(context, options, KERNELS)
