"""NVIDIA's kernel libraries by their own names, emulated: for dry runs without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from attnmux.core import Plugins
from attnmux.emulators.nvidia import flashinfer, sgl_flash_attn
from attnmux.emulators.nvidia.flash_attn_cute import FlashAttnCute
from attnmux.emulators.nvidia.flash_mla import flash_mla
from attnmux.emulators.nvidia.flash_mla_sparse import FlashMLA
from attnmux.emulators.nvidia.flashinfer import trtllm_decode, trtllm_prefill

PLUGIN = "attnmux.nvidia."
_PUBLIC = {name: value for name, value in vars(flashinfer).items() if not name.startswith("_")}
LIBRARIES: dict[str, dict[str, object]] = {
    "sgl_kernel": {"merge_state_v2": sgl_flash_attn.merge_state_v2},
    "sgl_kernel.flash_attn": vars(sgl_flash_attn),
    "flash_mla": {**vars(flash_mla), "flash_mla_sparse_fwd": FlashMLA.flash_mla_sparse_fwd},
    "flash_attn": {},
    "flash_attn.cute": {
        "flash_attn_varlen_func": FlashAttnCute(arch=90).flash_attn_varlen_func,
    },
    "flashinfer": _PUBLIC,
    "flashinfer.decode": {**_PUBLIC, **vars(trtllm_decode)},
    "flashinfer.prefill": vars(trtllm_prefill),
    "flashinfer.mla": _PUBLIC,
    "flashinfer.jit": {},
    "flashinfer.jit.attention": _PUBLIC,
    "flashinfer.jit.attention.variants": _PUBLIC,
}


@contextmanager
def emulated_libraries() -> Iterator[None]:
    """Make the libraries importable until the block ends.

    The card's factory and the calls by hand import them as on a GPU. The plugin's modules that are
    imported meanwhile are forgotten with them, since they hold the emulators.
    """
    Plugins.load().offers()  # the plugin's cards hold no library, and stay
    before = {name: sys.modules.get(name) for name in LIBRARIES}
    plugin = {name for name in sys.modules if name.startswith(PLUGIN)}
    for name, members in LIBRARIES.items():
        module = ModuleType(name)
        vars(module).update({key: value for key, value in members.items() if key[:2] != "__"})
        module.__path__ = []  # a package, so that its submodules can be imported
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, found in before.items():
            if found is None:
                del sys.modules[name]
            else:
                sys.modules[name] = found
        for name in [each for each in sys.modules if each.startswith(PLUGIN)]:
            if name not in plugin:
                parent, _, child = name.rpartition(".")
                del sys.modules[name]
                if hasattr(sys.modules.get(parent), child):
                    delattr(sys.modules[parent], child)
