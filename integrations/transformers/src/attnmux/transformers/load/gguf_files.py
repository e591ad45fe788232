"""The configurations of GGUF files, for verbs that choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from attnmux.transformers.load.checkpoint import read_config


def config_of(file: Path) -> dict[str, Any]:
    """The values of a config.json as transformers makes it of the file.

    The dtype is float32 unless it states one: transformers unpacks the weights to that.
    Raises InvalidInput for a file that transformers cannot read, and without its libraries.
    """
    config = read_config(str(file.parent), {"gguf_file": file.name}).to_dict()
    return {**config, "dtype": config.get("dtype") or "float32"}
