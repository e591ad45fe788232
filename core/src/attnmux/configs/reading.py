"""The request of a model, read from its files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from attnmux.configs.fields import read_model, stated_dtype
from attnmux.configs.gguf_files import gguf_file, read_gguf
from attnmux.configs.hub import EXPECTED, MODELOPT_FILE, local_path
from attnmux.configs.kv_schemes import kv_scheme
from attnmux.configs.values import parts_of, stated
from attnmux.configs.weights import weights_dtype
from attnmux.core import InvalidInput, Request
from attnmux.core.plugin import Files

MOST_BYTES = 2**24
"""The largest configuration that is read. Published ones have up to some 100 kB."""
LONGEST_NAME = 200
"""Characters of a path that an error shows."""


def request_from_model(
    path: str | Path,
    *,
    tp: int = 1,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    kv_dtype_skip: str | None = None,
    assume: bool = False,
) -> Request:
    """The model's needs, read from its Hugging Face `config.json`, or from a GGUF file.

    The dtype is the one that it states, else that of the weights. The KV dtype is that of the
    checkpoint's KV scheme, by compressed-tensors, ModelOpt or Quark.

    path: the folder, the file, or an id of the Hugging Face Hub, unless a folder has that name; its
    config.json is downloaded. transformers reads GGUF files (`attnmux-transformers[gguf]`).
    tp: divides the heads; KV heads replicate below one.
    dtype, kv_dtype: replace the checkpoint's own.
    kv_dtype_skip: layers that keep K and V in the model's dtype, as numbers, ranges and kinds:
    "0-1,31,sliding_window" (see `kept_layers`). They become groups of `other_layers`.
    assume: reads a model type that is not known as causal attention with as many KV heads as
    config.json says, or as attention over whole sequences if it is no decoder's.
    Raises UnknownModel for such a type otherwise, and InvalidInput if there is no usable
    config.json, if `tp` does not divide the heads, and for layers that cannot be skipped.
    """
    path = local_path(path)
    dtypes, folder = {"dtype": dtype, "kv_dtype": kv_dtype}, _folder(path)
    config = _with_quantisation(path)
    weights = None if stated_dtype(parts_of(config)) else weights_dtype(folder)
    chosen = {name: Request.canonical_dtype(value, name) for name, value in dtypes.items() if value}
    try:
        fields = read_model(
            config, tp, **chosen, kv_dtype_skip=kv_dtype_skip, assume=assume, weights=weights
        )
        request = Request(**fields, origins=dict.fromkeys(fields, "model"))
        return request.replace(**chosen) if chosen else request
    except InvalidInput as error:
        if error.argument in ("tp", "kv_dtype_skip"):
            raise
        got = f"{error.got} in {path}"
        raise InvalidInput(error.argument, got=got, expected=error.expected) from None


def stored_kv_dtype(path: str | Path) -> str | None:
    """The KV dtype of the checkpoint's KV scheme, of any model; None if it has none.

    Raises InvalidInput if there is no usable config.json, and for a scheme that no KV cache has.
    """
    parts = parts_of(_with_quantisation(Path(path)))
    return kv_scheme(stated(parts, "quantization_config"))


def _folder(path: Path) -> Path:
    return path if os.path.isdir(path) else path.parent  # false for any name


def _with_quantisation(path: Path) -> dict[str, Any]:
    """The config.json, with the `quantization_config` that ModelOpt may have in a file next to
    it."""
    config = load_config(path)
    scheme = {} if config.get("quantization_config") is not None else _modelopt(_folder(path))
    return {**config, **scheme}


def _modelopt(folder: Path) -> dict[str, Any]:
    """A `quantization_config` by ModelOpt, which may have a file of its own next to config.json."""
    try:
        content = json.loads(Files.read(str(folder / MODELOPT_FILE), MOST_BYTES))
        return {"quantization_config": content["quantization"]}
    except (OSError, ValueError, RecursionError, TypeError, LookupError):
        return {}


def load_config(path: Path) -> dict[str, Any]:
    """Raises InvalidInput for a path without a usable config.json or GGUF file."""
    gguf = gguf_file(path)
    if gguf is not None:
        return read_gguf(gguf)
    file, is_folder = path, False
    try:
        is_folder = path.is_dir()
        file = path / "config.json" if is_folder else path
        config = json.loads(Files.read(str(file), MOST_BYTES))
    except FileNotFoundError:
        got = f"{path}, which has no config.json" if is_folder else f"{path}: no such file"
        if (path / "adapter_config.json").is_file():
            got = f"{path}, which holds an adapter (adapter_config.json) and no model"
            expected = "the folder of the base model, whose attention the adapter leaves as it is"
            raise InvalidInput("model", got=got, expected=expected) from None
    except OSError as error:
        got = f"{str(file)[:LONGEST_NAME]}: {error.strerror or error}"
    except (ValueError, RecursionError) as error:
        got = f"{file}, which is not JSON ({error})"
    else:
        if isinstance(config, dict):
            return config
        got = f"{file}, which is not a JSON object"
    raise InvalidInput("model", got=got, expected=EXPECTED)
