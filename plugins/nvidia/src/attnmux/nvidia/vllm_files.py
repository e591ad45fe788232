"""Operators of vLLM's compiled files, without an import of vLLM: that takes seconds, and sets
variables of the process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def load_operators(name: str, operator: str, folder: str = "") -> Any:  # noqa: ANN401  # a namespace
    """`torch.ops.<name>`, from the file of that name in a folder of the package `vllm`.

    operator: one of them.

    Raises ImportError where vLLM is not installed or was built without the file, OSError where the
    file does not load.
    """
    operators = getattr(torch.ops, name)
    if hasattr(operators, operator):
        return operators
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    files = sorted(Path(spec.submodule_search_locations[0], folder).glob(f"{name}.*so"))
    if not files:
        raise ImportError(f"vllm has no {Path(folder, name)}: it is built for other devices")
    # vLLM's own import of the file later finds it loaded.
    torch.ops.load_library(files[0])
    return operators
