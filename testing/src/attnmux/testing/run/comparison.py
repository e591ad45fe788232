"""Tolerances and errors: the comparison of a backend's results with the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from attnmux.core import KVPool

if TYPE_CHECKING:
    from attnmux.core import LayerSpec


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
    # most, 2^-4 or 2^-3, of the value that it multiplies; values are normal, so that those of a row
    # with few keys may be of about 2 and cancel. The suite's Q has values of the format.
    dtype: Tolerance(atol=torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps / 2)
    for dtype in KVPool.FP8_DTYPES
}

LSE_TOLERANCE = {
    # Logits of up to about 4 may be rounded to bfloat16 before the sum: 2^-7 each.
    torch.bfloat16: Tolerance(atol=1.6e-2, rtol=4e-3),
    torch.float16: Tolerance(atol=2e-3, rtol=1e-3),
    torch.float32: Tolerance(atol=2e-5, rtol=1e-5),
}

FP8_LOGIT = 2.0**-11
"""Error of q·k over |q| |k| where 8-bit floats are multiplied. The suite's Q has values of the
format, so that rounding Q adds nothing. But matrix units keep about 14 bits of a sum and truncate
every product to them (DeepSeek-V3, arXiv 2412.19437, 3.3.2), 2^-13 of the largest partial sum. For
normal Q and K of D dims that sum is about 4 sqrt(D), |q| |k| is about D, and sqrt(D) truncations
add up as they would at random: 2^-13 * 4 sqrt(D) * sqrt(D) = 2^-11 D."""
ROUNDED_Q = 0.1
"""Error of an LSE where Q has other values than the format's and is rounded to it."""


def lse_tolerance(
    layer: LayerSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    *,
    fp8_products: bool,
    rounds_q: bool = False,
) -> Tolerance:
    """The tolerance of the LSE of a layer with Q of `dtype` over KV of `kv_dtype`.

    An LSE is off by no more than the logits are. fp8_products: whether the backend multiplies 8-bit
    floats. rounds_q: whether Q may have values that it rounds.
    """
    tolerance = LSE_TOLERANCE[dtype]
    if not fp8_products or kv_dtype not in KVPool.FP8_DTYPES:
        return tolerance
    wider = ROUNDED_Q if rounds_q else FP8_LOGIT * layer.scaling * layer.qk_head_dim
    return Tolerance(atol=tolerance.atol + wider, rtol=tolerance.rtol)


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


class Errors(NamedTuple):
    """Errors of an answer against float64 on the same inputs.

    `rms` and `worst` are in units of the output format's own rounding: u = eps / 2, the largest
    relative error of rounding one number to the format (2^-8 for bfloat16, 2^-11 for float16). An
    answer that is right until it is rounded has an rms below 1.
    """

    relative: float
    """Norm of the difference divided by the norm of the expected answer; infinite where the answer
    is not finite."""
    rms: float
    """`relative` / u, over all sampled queries and heads."""
    worst: float
    """The same for the one query and head, a vector [Dv], for which it is largest."""


def errors_between(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> Errors:
    """Errors of `found` [T, Hq, Dv] against `expected`; dtype: the output format.

    `worst` takes a vector of subnormal numbers, whose roundings are absolute, for one of the
    smallest normal numbers: float16 has them where a sink outweighs all keys.
    """
    info = torch.finfo(dtype)
    unit, smallest = info.eps / 2, info.tiny * expected.shape[-1] ** 0.5
    relative = distance(found, expected)
    norms = expected.norm(dim=-1)
    off = (found - expected).norm(dim=-1)
    seen = norms > 0  # a row without keys is 0, which no error can be relative to
    worst = float((off[seen] / norms[seen].clamp_min(smallest)).max()) if bool(seen.any()) else 0.0
    worst = worst if worst == worst else float("inf")
    return Errors(relative=relative, rms=relative / unit, worst=worst / unit)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference divided by the norm of `expected`; infinite where that is NaN."""
    off = float((found - expected).norm() / expected.norm())
    return off if off == off else float("inf")
