"""The linear layers of `native`, against float64."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnmux.core import BackendFailed, InvalidInput, Platform, Settings
from attnmux.core.find.cpu import probe_cpu
from attnmux.cpu import compiled, levels
from attnmux.cpu.levels import AVX2, AVX512, BASELINE, COMPILERS, Level, levels_of
from attnmux.cpu.native.linear import SERVED, NativeLinear, make_linear

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="the kernels are compiled here"
)
ROUNDING = {torch.float32: 2**-22, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def on(platform: Platform) -> Any:
    return SimpleNamespace(platform=platform)


@pytest.fixture(scope="module", params=SERVED)
def linear(request: pytest.FixtureRequest) -> NativeLinear:
    """Of a level that this CPU has."""
    cpu = probe_cpu()
    level = next(level for level in levels_of(cpu.arch) if level.name == request.param)
    if not cpu.features >= set(level.features):
        pytest.skip(f"this CPU is no {level.name}")
    features = cpu.features & {*level.features, "cxx_compiler"}
    try:
        return NativeLinear(on(replace(cpu, features=features)))
    except BackendFailed as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "width", "num_out"),
    [
        (1, 896, 100),
        (1, 2080, 33),
        (3, 32, 7),
        (4, 96, 30),
        (8, 544, 48),
        (9, 928, 130),
        (17, 288, 96),
        (40, 64, 11),
        (260, 288, 50),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_products(
    linear: NativeLinear, dtype: torch.dtype, num_rows: int, width: int, num_out: int, biased: bool
) -> None:
    assert_right(linear, dtype, num_rows, width, num_out, biased)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_random_shapes(linear: NativeLinear, dtype: torch.dtype) -> None:
    rng = random.Random()
    for _ in range(12):
        shape = rng.randint(1, 300), 32 * rng.randint(1, 40), rng.randint(1, 300)
        assert_right(linear, dtype, *shape, biased=rng.random() < 0.5)


def assert_right(
    linear: NativeLinear, dtype: torch.dtype, num_rows: int, width: int, num_out: int, biased: bool
) -> None:
    x, weight = torch.randn(num_rows, width).to(dtype), torch.randn(num_out, width).to(dtype)
    bias = torch.randn(num_out).to(dtype) if biased else None
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().T
    error = (linear(x, weight, bias).double() - expected).abs()
    allowed = ROUNDING[dtype] * expected.abs() + 2**-20 * size + 1e-6
    assert (error <= allowed).all(), (num_rows, width, num_out, biased)


def test_rows_that_are_slices_of_others_and_any_number_of_dims(linear: NativeLinear) -> None:
    x, weight = torch.randn(2, 5, 96)[..., 16:80].bfloat16(), torch.randn(24, 64).bfloat16()
    torch.testing.assert_close(linear(x, weight, None), (x.float() @ weight.float().T).bfloat16())
    assert linear(x[:, :0], weight, None).shape == (2, 0, 24)


def test_refusals(linear: NativeLinear) -> None:
    weight = torch.randn(24, 64).bfloat16()
    assert 1 in linear.rows(weight)
    assert 4 in linear.rows(weight.float())
    assert 2 in SERVED[AVX2.name].rows[torch.float32]
    assert 1 not in SERVED[AVX2.name].rows[torch.float32]
    assert not linear.rows(weight.double())
    assert not linear.rows(weight[:, :50].contiguous())
    assert not linear.rows(weight.T)
    with pytest.raises(InvalidInput, match="float32"):
        linear(torch.randn(1, 64), weight, None)
    with pytest.raises(InvalidInput, match="65"):
        linear(torch.randn(1, 65).bfloat16(), weight, None)


def test_widths_of_whole_vectors_alone_are_served(linear: NativeLinear) -> None:
    weight, bias = torch.randn(24, 528).bfloat16(), torch.randn(24).bfloat16()
    if not linear.rows(weight):
        assert linear.rows(weight[:, :512])
        return
    x = torch.randn(5, 528).bfloat16()
    expected = torch.nn.functional.linear(x.float(), weight.float(), bias.float()).bfloat16()
    torch.testing.assert_close(linear(x, weight, bias), expected)


@pytest.mark.parametrize("level", [BASELINE, AVX2], ids=lambda level: level.name)
def test_not_offered_where_it_was_not_found_faster(
    level: Level, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(levels, "FOLDER", tmp_path)  # no kernels came with the wheel
    monkeypatch.setattr(Settings, "cache_folder", lambda self: tmp_path)
    features = {*level.features} if level is AVX2 else {*level.features, "cxx_compiler"}
    platform = replace(Platform.parse("cpu:x86_64"), features=frozenset(features))
    assert make_linear(on(platform)) is None


def test_not_offered_where_only_a_compiler_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever names another backend waits for no compiler."""
    monkeypatch.setattr(Settings, "cache_folder", lambda self: tmp_path)
    monkeypatch.setattr(compiled, "FOLDER", tmp_path / "wheel")
    monkeypatch.setattr(compiled, "_run", None)
    features = frozenset({*AVX512.features, "cxx_compiler"})
    platform = replace(Platform.parse("cpu:x86_64"), features=features)
    assert make_linear(on(platform)) is None
