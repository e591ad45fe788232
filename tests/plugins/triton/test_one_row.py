"""Products of one row with a weight, against float64. As a script it compiles the kernel."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import InvalidInput

pytest.importorskip("triton")

from attnmux.triton.functions.one_row import OneRowProducts, make_linear  # where there is a Triton

OVERLAP = "attnmux.triton.kernels.overlap"


def operands(num_out: int, width: int, dtype: torch.dtype, *, gap: int = 0):
    weight = torch.randn(num_out, width + gap).to(dtype)[:, :width]
    return torch.randn(1, 1, width).to(dtype), weight, torch.randn(num_out).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_out", "width", "gap"),
    [(64, 1024, 0), (9, 512, 24), (1, 520, 0), (30, 7, 1), (17, 2040, 8)],
)
@pytest.mark.parametrize("is_biased", [True, False])
def test_products_agree(num_out, width, gap, dtype, is_biased) -> None:
    x, weight, bias = operands(num_out, width, dtype, gap=gap)
    bias = bias if is_biased else None
    products = OneRowProducts()
    assert 1 in products.rows(weight)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    for multiply in (products, products.op):
        found = multiply(x, weight, bias)
        assert (found.dtype, found.shape) == (dtype, (1, 1, num_out))
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.double(), expected, rtol=eps, atol=eps)


def test_rows_that_lie_apart() -> None:
    x, weight, _ = operands(8, 64, torch.float16)
    apart = torch.stack([x[0, 0], x[0, 0]], 1)[:, 0]
    assert torch.equal(
        OneRowProducts()(apart, weight, None), OneRowProducts()(x, weight, None)[0, 0]
    )


@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (torch.zeros(2, 8), torch.zeros(4)),
        (torch.zeros(1, 9), torch.zeros(4)),
        (torch.zeros(1, 8), torch.zeros(5)),
        (torch.zeros(1, 8).double(), torch.zeros(4)),
        (torch.zeros(1, 8), torch.zeros(4).double()),
    ],
)
def test_operands_that_do_not_fit(x, bias) -> None:
    with pytest.raises(InvalidInput, match="one row"):
        OneRowProducts()(
            x.half() if x.dtype == torch.float32 else x, torch.zeros(4, 8).half(), bias
        )


def test_what_is_left_to_torch() -> None:
    products = OneRowProducts()
    for weight in (torch.zeros(4, 8), torch.zeros(8, 4).half().T, torch.zeros(0, 8).half()):
        assert not products.rows(weight)
    for arch, serves in (("sm90", True), ("sm80", False), ("gfx942", False)):
        made = make_linear(SimpleNamespace(platform=SimpleNamespace(arch=arch)))
        assert (made is not None) is serves


def test_the_compiled_kernel_copies_ahead_without_spills(script) -> None:
    (facts,) = script()
    assert facts["wide copies"] > 0
    assert facts["local memory"] == 0
    assert (facts["waits"], facts["lets begin"]) == (1, 1)


def test_a_triton_without_nvidias_backend(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.language.extra.cuda", None)
    monkeypatch.delitem(sys.modules, OVERLAP)
    importlib.import_module(OVERLAP).await_previous[(1,)](True)


def test_the_benchmark_runs_in_small(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3]))
    benchmark = importlib.import_module("benchmarks.one_row")
    path = tmp_path / "figures.json"
    given = ["--device", "cpu", "--rounds", "1", "--json", str(path)]
    result = CliRunner().invoke(benchmark.main, given, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == len(benchmark.TINY)
    assert all(0 <= row["error"] < 0.02 for row in rows)


def main() -> None:
    from compile_kernel import compile_kernel, facts  # noqa: PLC0415  # not the interpreter's

    from attnmux.triton.functions.one_row import BLOCK_K, BLOCK_N, STAGES, WARPS  # noqa: PLC0415  # as above
    from attnmux.triton.kernels.one_row import multiply_row  # noqa: PLC0415  # as above

    compiled = compile_kernel(
        multiply_row,
        {"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "out": "*bf16"},
        {
            "IS_EVEN": True,
            "BLOCK_N": BLOCK_N,
            "BLOCK_K": BLOCK_K,
            "STAGES": STAGES,
            "OVERLAPS": True,
        },
        options={"num_warps": WARPS, "launch_pdl": True},
    )
    ptx = compiled.asm["ptx"]
    begins = {
        "waits": ptx.count("griddepcontrol.wait"),
        "lets begin": ptx.count("griddepcontrol.launch_dependents"),
    }
    print(json.dumps({**facts(compiled), **begins}))


if __name__ == "__main__":
    main()
