"""What rounding K and V changes."""

from __future__ import annotations

import pytest

from attnmux.core import Request
from attnmux.testing.bench.rounding import rounding_error

PLAIN = {"head_dim": 64, "dtype": "bfloat16"}
LATENT = {"kind": "mla", "kv_lora_rank": 64, "qk_rope_head_dim": 32, "head_dim": 64}


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [
        ("float32", 0, 0),
        ("bfloat16", 1e-3, 4e-3),
        # An e4m3 number is off by 2% and an E2M1 one by 9%, of a normal distribution
        ("fp8_e4m3", 0.02, 0.06),
        ("fp4_e2m1", 0.09, 0.2),
    ],
)
def test_fewer_bits_move_a_result_further(dtype, least, most):
    assert least <= rounding_error(Request(**PLAIN), dtype) <= most


def test_latents_are_rounded_once():
    request = Request(**LATENT)
    assert rounding_error(request, "float32") < 1e-12
    assert 0.004 <= rounding_error(request, "fp8_e4m3") <= 0.06
