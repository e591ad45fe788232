from __future__ import annotations

import pytest
import torch

from attnmux.core import InvalidInput, Request, torch_dtype


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("float32", torch.float32),
        ("fp8_e4m3", torch.float8_e4m3fn),
        ("fp8_e5m2", torch.float8_e5m2),
        ("fp8_e4m3fnuz", torch.float8_e4m3fnuz),
        ("fp4_e2m1", torch.float4_e2m1fn_x2),
    ],
)
def test_names_and_dtypes_are_one_to_one(name, dtype):
    assert torch_dtype(name) is dtype
    assert Request.canonical_dtype(dtype) == name


@pytest.mark.parametrize(
    ("alias", "name"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_aliases(alias, name):
    assert torch_dtype(alias) is torch_dtype(name)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(InvalidInput, match=r"'int4'"):
        torch_dtype("int4")
    with pytest.raises(InvalidInput, match="bfloat16"):
        Request.canonical_dtype(torch.int64)
