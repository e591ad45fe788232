"""Operators of vLLM's compiled files, without an import of vLLM, which takes seconds and sets
variables of the process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def load_operators(namespace: str, operator: str, file: str) -> Any:  # noqa: ANN401  # of operators
    """`torch.ops.<namespace>`, from a file of the package `vllm`.

    operator: one of them. file: its path there, without its ending.
    Raises ImportError if vLLM is not installed or was built without the file, OSError if the
    file does not load, AttributeError if it has no such operator.
    """
    operators = getattr(torch.ops, namespace)
    if hasattr(operators, operator):
        return operators
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'vllm'", name="vllm")
    files = sorted(Path(spec.submodule_search_locations[0]).glob(f"{file}.*so"))
    if not files:
        raise ImportError(f"vllm has no {file}: it is built for other devices")
    # vLLM's own import of the file later finds it loaded.
    try:
        torch.ops.load_library(files[0])  # type: ignore[no-untyped-call]  # torch's own
    except OSError as error:
        raise OSError(f"{files[0]}: {error.__cause__ or error}") from error
    getattr(operators, operator)
    return operators
