"""When a step of latent attention (MLA) takes fewer operations with expanded heads."""

from __future__ import annotations

import math
from collections.abc import Sequence


def crossing_by_operations(*, rank: int, nope: int, v: int) -> float:
    """New tokens on a long prefix from which a step takes fewer operations with expanded heads.

    Operations for each head, with one multiplication and addition as one:

        absorbed  pairs * (2 * rank + rope) + new * rank * (nope + v)
        expanded  pairs * (nope + rope + v) + (new + cached) * rank * (nope + v)

    for `new` tokens on `cached` ones and `pairs` of a new token and a key that it sees, so that
    expanding takes fewer if pairs > crossing * cached, with

        crossing = rank * (nope + v) / (2 * rank - nope - v)

    which is 171 for DeepSeek's 512, 128 and 128 dims; infinity if it never does.
    """
    saved = 2 * rank - nope - v
    return rank * (nope + v) / saved if saved > 0 else math.inf


def expansion_pays(new: Sequence[int], cached: Sequence[int], crossing: float) -> bool:
    """Whether a step should run expanded.

    new, cached: tokens of each request. crossing: of `crossing_by_operations`, or measured.
    """
    pairs = sum(n * p + n * (n + 1) // 2 for n, p in zip(new, cached, strict=True))
    return crossing < math.inf and pairs > crossing * sum(cached)
