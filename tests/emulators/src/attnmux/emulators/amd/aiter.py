"""AITER's own Triton kernels, off AMD's devices.

`import aiter` builds and loads code for AMD's devices. Here its packages are imported without their
`__init__`, and what its Triton modules ask of the device is answered for an MI300X.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec

from attnmux.amd import CARDS, AiterKernels

ARCH = "gfx942"
FEW_UNITS = 4
"""AITER splits keys into parts for so many compute units, and the interpreter runs each part."""


def aiter_kernels(compute_units: int = FEW_UNITS) -> AiterKernels:
    """The functions of the installed amd-aiter. Raises ImportError without it.

    compute_units: of the device; an MI300X has 304.
    """
    if "aiter" not in sys.modules:
        spec = find_spec("aiter")
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError("amd-aiter is not installed", name="aiter")
        folder = spec.submodule_search_locations[0]
        for name in ("aiter", "aiter.ops", "aiter.ops.triton"):
            # With a spec, as `find_spec` demands of loaded modules
            package = ModuleSpec(name, None, is_package=True)
            path = folder + name.removeprefix("aiter").replace(".", "/")
            package.submodule_search_locations = [path]
            sys.modules[name] = module_from_spec(package)
        arch_info = importlib.import_module("aiter.ops.triton.utils._triton.arch_info")
        arch_info.get_arch = lambda: ARCH  # type: ignore[attr-defined]  # the device's name
        device_info = importlib.import_module("aiter.ops.triton.utils.device_info")
        device_info.get_num_sms = lambda: compute_units  # type: ignore[attr-defined]  # as above
    card = next(card for card in CARDS if card.name == "aiter")
    kernels: AiterKernels = pkgutil.resolve_name(card.factory).providers["aiter 0.1.7"]()
    return kernels
