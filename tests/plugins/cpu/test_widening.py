from __future__ import annotations

import pytest
import torch

from attnmux.cpu.torch_native.attend import Widening


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(2**16, 2), (255,), (3, 5, 7), (0, 4)])
def test_every_value_is_the_same(source, target, shape):
    count = torch.Size(shape).numel()
    if shape == (2**16, 2):  # every pair of values
        first = torch.arange(2**16) % 256
        second = torch.arange(2**16) // 256
        bits = torch.stack([first, second], dim=1).to(torch.uint8)
    else:
        bits = torch.randint(256, (count,)).to(torch.uint8).view(shape)
    values = bits.view(source)
    out = torch.empty(shape, dtype=target)
    widening = Widening(source, target, torch.device("cpu"))
    assert widening(values, out, scratch) is out
    torch.testing.assert_close(out, values.to(target), atol=0, rtol=0, equal_nan=True)
