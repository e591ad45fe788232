"""The dtype of a checkpoint's weights, read from the header of its first file."""

from __future__ import annotations

import json
from pathlib import Path

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""By the names in safetensors."""
MOST_BYTES = 2**27
"""The largest header that is read."""


def weights_dtype(folder: Path) -> str | None:
    """That of the first tensor of floats, as transformers' "auto" takes it if config.json states
    none; None without a readable *.safetensors."""
    files = sorted(folder.glob("model*.safetensors")) if folder.is_dir() else []
    try:
        with files[0].open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            tensors = json.loads(file.read(size)) if size <= MOST_BYTES else {}
        stored = [tensor["dtype"] for name, tensor in tensors.items() if name != "__metadata__"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return next((DTYPES[dtype] for dtype in stored if dtype in DTYPES), None)
