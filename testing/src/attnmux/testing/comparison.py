"""Tolerances, and the comparison of a backend's results with the reference."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attnmux.core.kv.quantise import FP8_DTYPES


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """|actual - expected| may be `atol + rtol * |expected|`."""

    atol: float
    rtol: float


OUTPUT_TOLERANCE = {
    # Half a unit in the last place of the output, 2^-9, and as much for weights in bfloat16.
    torch.bfloat16: Tolerance(atol=8e-3, rtol=1.6e-2),
    # The same with 2^-12.
    torch.float16: Tolerance(atol=1e-3, rtol=2e-3),
    # Sums of a thousand float32 products; kernels may also approximate exp and tanh.
    torch.float32: Tolerance(atol=2e-5, rtol=1e-4),
}

FP8_WEIGHTS_TOLERANCE = {
    # Weights of the values are rounded to the format, each by half a unit in its last place at
    # most, 2^-4 or 2^-3; the suite's values are of about 1, and its Q has values of the format.
    dtype: Tolerance(atol=torch.finfo(dtype).eps / 2, rtol=torch.finfo(dtype).eps / 2)
    for dtype in FP8_DTYPES
}

LSE_TOLERANCE = {
    # Logits of up to about 4 may be rounded to bfloat16 before the sum: 2^-7 each.
    torch.bfloat16: Tolerance(atol=1.6e-2, rtol=4e-3),
    torch.float16: Tolerance(atol=2e-3, rtol=1e-3),
    torch.float32: Tolerance(atol=2e-5, rtol=1e-5),
}


def output_tolerance(dtype: torch.dtype, kv_dtype: torch.dtype, *, fp8_products: bool) -> Tolerance:
    """The tolerance of outputs of `dtype` over KV of `kv_dtype`.

    The reference reads the same quantised K and V, so that the tolerance is wider only if the
    backend multiplies 8-bit floats.
    """
    tolerance = OUTPUT_TOLERANCE[dtype]
    if not fp8_products or kv_dtype not in FP8_WEIGHTS_TOLERANCE:
        return tolerance
    wider = FP8_WEIGHTS_TOLERANCE[kv_dtype]
    return Tolerance(atol=tolerance.atol + wider.atol, rtol=tolerance.rtol + wider.rtol)


class Disagreement(Exception):
    """A backend's results or writes differ from what the contract requires."""


def compare(what: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance) -> float:
    """The largest absolute difference of [T, Hq, …] tensors.

    Raises Disagreement, with the row and head of the largest, if one exceeds the tolerance. NaN
    never agrees; equal infinities do.
    """
    if not actual.numel():
        return 0.0
    actual = actual.double()
    close = torch.isclose(actual, expected, rtol=tolerance.rtol, atol=tolerance.atol)
    error = torch.where(actual == expected, 0.0, (actual - expected).abs())
    if bool(close.all()):
        return float(error.max())
    wrong = torch.where(close, -1.0, error.nan_to_num(nan=torch.inf, posinf=torch.inf))
    index = [int(place) for place in torch.unravel_index(wrong.argmax(), wrong.shape)]
    raise Disagreement(
        f"{what}: {int((~close).sum())} of {close.numel()} values differ; the worst is row "
        f"{index[0]}, head {index[1]}: {float(actual[tuple(index)]):.6g} instead of "
        f"{float(expected[tuple(index)]):.6g} (tolerance {tolerance.atol:g} + "
        f"{tolerance.rtol:g} * |expected|)"
    )
