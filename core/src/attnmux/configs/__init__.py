"""Reads a model's request for attention from its configuration. No torch, and no transformers.

`attnmux.core` does not import this package: `attnmux select --model` finds it by its entry point.
"""

from attnmux.configs.gguf_files import gguf_file
from attnmux.configs.kept import kept_layers
from attnmux.configs.reading import request_from_model, stored_kv_dtype
from attnmux.configs.values import UnknownModel
from attnmux.configs.weights import weights_dtype

__all__ = [
    "UnknownModel",
    "gguf_file",
    "kept_layers",
    "request_from_model",
    "stored_kv_dtype",
    "weights_dtype",
]
