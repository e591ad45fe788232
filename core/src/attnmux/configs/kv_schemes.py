"""The KV dtype that a quantised checkpoint was calibrated for, by its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from attnmux.core import InvalidInput

DTYPES: Mapping[str, str] = {
    **dict.fromkeys(("float8", "fp8", "fp8_e4m3"), "fp8_e4m3"),
    "fp8_e5m2": "fp8_e5m2",
    **dict.fromkeys(("float4", "nvfp4"), "fp4_e2m1"),
}
"""The dtype by the words of compressed-tensors (its type and bits), ModelOpt and Quark."""


def kv_scheme(quantisation: object) -> str | None:
    """The KV dtype of a `quantization_config`; None if K and V keep the model's.

    Raises InvalidInput for one that a KV cache cannot have.
    """
    if not isinstance(quantisation, dict):
        return None
    words = {word.lower() for word in _words(quantisation)} - {"none"}
    dtypes = {DTYPES.get(word) for word in words}
    if not dtypes:
        return None
    if len(dtypes) > 1 or None in dtypes:
        got = f"a checkpoint whose K and V are {' and '.join(sorted(words))}"
        raise InvalidInput("kv_dtype", got=got, expected=f"{', '.join(DTYPES)}; or state kv_dtype")
    return dtypes.pop()


def _words(quantisation: Mapping[str, Any]) -> Iterator[str]:
    scheme = quantisation.get("kv_cache_scheme")  # compressed-tensors, and ModelOpt's later files
    if isinstance(scheme, dict):
        yield f"{scheme.get('type')}{scheme.get('num_bits')}"
    algorithm = quantisation.get("kv_cache_quant_algo")  # ModelOpt
    if isinstance(algorithm, str):
        yield algorithm
    export = quantisation.get("export")  # Quark
    names = export.get("kv_cache_group") if isinstance(export, dict) else None
    layers = quantisation.get("layer_quant_config")
    for name in names or ():
        layer = layers.get(name) if isinstance(layers, dict) else None
        stored = layer.get("output_tensors") if isinstance(layer, dict) else None
        yield str(stored.get("dtype")) if isinstance(stored, dict) else "fp8"
