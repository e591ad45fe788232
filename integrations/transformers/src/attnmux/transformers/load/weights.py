"""The weights of a checkpoint, loaded into its model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from textwrap import shorten
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from attnmux.core import AttnmuxError, InvalidInput, Request
from attnmux.transformers.load.checkpoint import (
    ALWAYS,
    LOADING,
    Checkpoint,
    auto_classes,
    explained,
    in_one_line,
    quiet_transformers,
)
from attnmux.transformers.load.quantised import EXPECTED as QUANTISED
from attnmux.transformers.load.quantised import KV_SCALES, check_files, weight_scales
from attnmux.transformers.model.attention import SERVED, set_attention
from attnmux.transformers.model.own_attention import adapt, has_adapter


def warn_in_python(text: str) -> None:
    """Issue a UserWarning, for callers without a channel of their own."""
    warnings.warn(text, stacklevel=3)


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    split: Callable[[PreTrainedModel], None] | None = None,
    progress: bool = False,
    warn: Callable[[str], None] = warn_in_python,
) -> PreTrainedModel:
    """Load the weights, with attention through attnmux.

    split: called with the model on the host, and keeps a part of its weights. warn: called with a
    sentence about tensors that the model does not read.
    Raises InvalidInput for weights that are absent, unreadable or incomplete, since a missing
    tensor would run with random values, and for quantised ones whose scales nothing reads. Raises
    AttnmuxError when they do not fit on the device.
    """
    source = checkpoint.source
    if checkpoint.gguf is None:
        _check_indices(source)
        with explained(source):
            check_files(source, checkpoint.config)
    model_class = auto_classes(checkpoint.config)[1].get(type(checkpoint.config), None)
    is_own = isinstance(model_class, type) and has_adapter(model_class)
    with LOADING, quiet_transformers(progress=progress), explained(source):
        loaded: Any = auto_classes(checkpoint.config)[0].from_pretrained(
            source,
            config=checkpoint.config,
            **checkpoint.place,
            dtype=dtype,
            attn_implementation="eager" if is_own else SERVED,
            ignore_mismatched_sizes=True,  # reported below, as missing tensors are
            output_loading_info=True,
            **ALWAYS,
        )
    model: torch.nn.Module = loaded[0]
    if is_own:
        adapt(loaded[0])
        set_attention(loaded[0], SERVED)
    info: dict[str, Any] = loaded[1]
    missing = sorted(info["missing_keys"])
    mismatched = sorted(str(key[0]) for key in info["mismatched_keys"])
    if missing or mismatched or info["error_msgs"]:
        problems = [
            *(f"no {_shown(missing)}" for _ in missing[:1]),
            *(f"another shape of {_shown(mismatched)}" for _ in mismatched[:1]),
            *info["error_msgs"],
        ]
        raise InvalidInput(
            "model",
            got=f"{source} with {'; '.join(problems)}",
            expected="a checkpoint with every tensor of its model",
        )
    unexpected = sorted(info["unexpected_keys"])
    if codes := weight_scales(unexpected):
        got = f"{source}, whose weights have scales that its model does not read: {_shown(codes)}"
        raise InvalidInput("model", got=got, expected=QUANTISED)
    if others := [name for name in unexpected if not name.endswith(KV_SCALES)]:
        warn(f"{source} holds tensors that its model does not read: {_shown(others)}")
    if split is not None:
        split(cast("PreTrainedModel", model))
    try:
        model.to(device)
    except torch.OutOfMemoryError as error:
        weights = f"{Request.canonical_dtype(dtype)} weights of {source}"
        raise AttnmuxError(f"{weights} do not fit on {device}: {in_one_line(error)}") from error
    return cast("PreTrainedModel", model.eval())


def _check_indices(source: str) -> None:
    """Refuse a folder whose weight index names files outside it."""
    folder = Path(source)
    for index in (*folder.glob("*.safetensors.index.json"), *folder.glob("*.bin.index.json")):
        with explained(source):
            names = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
        for name in sorted(names):
            path = PurePosixPath(name.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts or ":" in path.parts[0]:
                got = f"{index}, which names {shorten(name, 100)}"
                raise InvalidInput("model", got=got, expected="weights inside the folder")


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
