"""Quantised checkpoints: which are refused, since they would run on raw codes, and the scales of K
and V."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from attnmux.core import InvalidInput, LayerSpec

FLOAT8 = ("F8_", "float8_", "torch.float8_")
"""How names of dtypes begin, in safetensors and in torch."""

KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")
"""Endings of the names of tensors that were calibrated for a quantised KV cache."""

OF_LAYER = re.compile(r"\.layers\.(\d+)\.")

WEIGHT_SCALE = re.compile(r"\.(weight_scale|scale_weight)[^.]*$")

EXPECTED = "weights in float32, float16 or bfloat16, or a method that transformers reads"


def check_method(source: str, config: PreTrainedConfig) -> None:
    """Raise InvalidInput for a quantisation method that transformers does not know: it would load
    the codes as weights, with a warning in its log."""
    method = _method(config)
    if method is None or method in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    known = ", ".join(sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
    got = f"{source}, quantised by {method!r} (quantization_config.quant_method of config.json)"
    raise InvalidInput("model", got=got, expected=f"{EXPECTED}: {known}")


def check_files(source: str, config: PreTrainedConfig) -> None:
    """Raise InvalidInput for a folder with float8 weights whose scales nothing reads. It reads the
    headers of *.safetensors alone."""
    if _method(config) is not None:
        return
    dtypes = {}
    for path in sorted(Path(source).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            dtypes.update({name: file.get_slice(name).get_dtype() for name in file.keys()})  # noqa: SIM118  # no mapping
    check_scales(source, dtypes)


def check_scales(source: str, dtypes: Mapping[str, str]) -> None:
    """Raise InvalidInput for float8 weights with scales. dtypes: by the tensor's name."""
    codes = (name for name, dtype in dtypes.items() if dtype.startswith(FLOAT8))
    owners = {name.rpartition(".")[0]: name for name in codes}
    for name in dtypes:
        owner, _, tail = name.rpartition(".")
        if owner in owners and "scale" in tail and not name.endswith(KV_SCALES):
            got = f"{source}, whose {owners[owner]} has float8 codes and a scale, {name}"
            raise InvalidInput("model", got=got, expected=EXPECTED)


def with_kv_scales(
    layers: Sequence[LayerSpec],
    folder: Path,
    warn: Callable[[str], None],
    numbers: Mapping[str, int] | None = None,
) -> tuple[LayerSpec, ...]:
    """The layers with the checkpoint's scales of K and V, which a KV cache of few bits divides by.

    folder: it reads the *.safetensors there. warn: called with a sentence about scales that are not
    one number a layer. numbers: the layers' numbers by the names of their modules; None reads them
    in the names of the scales.
    """
    scales: dict[int, dict[str, Any]] = {}
    unused = []
    for name, value in _kv_scales(folder):
        layer_id = _in_name(name) if numbers is None else _owner(name, numbers)
        if layer_id is None or value.numel() != 1:
            unused.append(name)
            continue
        owner = "kv" if name.endswith(".kv_scale") else name.removesuffix(".output_scale")
        for side in ("k", "v"):
            if owner == "kv" or owner.rpartition(".")[2].startswith(side):
                scales.setdefault(layer_id, {})[f"{side}_scale"] = float(value)
    known = {layer.layer_id for layer in layers}
    unused += [f"layer {number}" for number in sorted(scales.keys() - known)]
    if unused:
        warn(
            f"{folder} holds scales of K and V that are not one number for each attention layer "
            f"({', '.join(unused[:3])}): a KV cache of few bits takes a scale of 1 there"
        )
    return tuple(replace(layer, **scales.get(layer.layer_id, {})) for layer in layers)


def _in_name(scale: str) -> int | None:
    layer = OF_LAYER.search(scale)
    return None if layer is None else int(layer[1])


def _owner(scale: str, numbers: Mapping[str, int]) -> int | None:
    """The number of the module that the scale belongs to, or its projection of K or V.

    Names in files may lack the first part of a module's name.
    """
    for name in (scale.rpartition(".")[0], scale.rpartition(".")[0].rpartition(".")[0]):
        matches = [number for number in numbers if f".{number}".endswith(f".{name}")]
        if name and len(matches) == 1:
            return numbers[matches[0]]
    return None


def _kv_scales(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                if name.endswith(KV_SCALES):
                    yield name, file.get_tensor(name)


def weight_scales(names: Iterable[str]) -> list[str]:
    """The names that can only scale a weight, such as `x.weight_scale` and `x.weight_scale_inv`."""
    return [name for name in names if WEIGHT_SCALE.search(name)]


def _method(config: PreTrainedConfig) -> str | None:
    """The checkpoint's quantisation method; None without one, or if it is left to transformers
    to find."""
    scheme: Any = getattr(config, "quantization_config", None)
    if scheme is None:
        scheme = getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if scheme is None:
        return None
    method = scheme.get("quant_method") if isinstance(scheme, Mapping) else scheme.quant_method
    return (
        "bitsandbytes_8bit"
        if method in (None, "bitsandbytes")
        else str(getattr(method, "value", method))
    )
