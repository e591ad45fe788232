"""Products of one row with a weight, against float64. As a script it compiles the kernel."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import InvalidInput

pytest.importorskip("triton")

from attnmux.triton.functions.one_row import (  # where there is a Triton
    NORMED_BLOCKS,
    PLAIN_BLOCKS,
    Around,
    Blocks,
    OneRowProducts,
    make_linear,
    multiply_row,
)

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


def rotated(product, cos, sin, num_rotated):
    heads = product[:num_rotated].view(-1, len(cos))
    low, high = heads.chunk(2, -1)
    turned = heads * cos + torch.cat([-high, low], -1) * sin
    return torch.cat([turned.flatten(), product[num_rotated:]])


def exact(x, weight, bias, around):
    """A product and what is around it, in float64, with roundings of `multiply_row` alone."""
    values = x.double().flatten()
    if around.norm_weight is not None:
        values = values * (values.square().mean() + around.eps).rsqrt()
        values = values * (around.norm_weight.double() + around.norm_offset)
    product = weight.double() @ values + (0 if bias is None else bias.double())
    if around.residual is not None:
        product = product + around.residual.double().flatten()
    if around.gate is not None:
        low, high = product.chunk(2)
        product = GATES[around.gate](low) * high
    if around.cos is not None:
        cos, sin = around.cos.double(), around.sin.double()
        product = rotated(product, cos, sin, around.num_rotated)
    return product


GATES = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}
AROUND = {
    "norm": lambda n, k, of: Around(norm_weight=of(k), eps=1e-5),
    "norm from one": lambda n, k, of: Around(norm_weight=of(k), eps=0.1, norm_offset=1.0),
    "residual": lambda n, k, of: Around(residual=of(1, 1, n)),
    "norm, residual": lambda n, k, of: Around(residual=of(1, n), norm_weight=of(k), eps=1e-6),
    **{name: lambda n, k, of, name=name: Around(gate=name) for name in GATES},
    "norm, gate": lambda n, k, of: Around(gate="silu", norm_weight=of(k), eps=1e-6),
    "rotary": lambda n, k, of: Around(cos=of(n // 3), sin=of(n // 3), num_rotated=2 * (n // 3)),
    "norm, rotary": lambda n, k, of: Around(
        cos=of(6), sin=of(6), num_rotated=n - 6, norm_weight=of(k), eps=1e-5
    ),
}
"""What is around a product [N, K], by name, with tensors of these sizes."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("num_out", "width"), [(48, 1024), (18, 520), (42, 7), (30, 2040)])
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("blocks", [Blocks(), Blocks(rows=16, columns=128)])
def test_what_is_around_agrees(name, num_out, width, blocks, dtype) -> None:
    def of(*shape):
        return torch.randn(shape).to(dtype)

    around = AROUND[name](num_out, width, of)
    x, weight, bias = operands(num_out, width, dtype, gap=width % 2)
    x, weight = 2 * x, weight / width**0.5
    for biased in (bias, None):
        expected = exact(x, weight, biased, around)
        found = multiply_row(x, weight, biased, around, blocks)
        assert (found.dtype, found.shape) == (dtype, (1, 1, len(expected)))
        # Products are rounded before what follows, which may cancel them
        eps = torch.finfo(dtype).eps
        atol = 2 * eps * float(expected.abs().max().clamp(min=1))
        torch.testing.assert_close(found.double().flatten(), expected, rtol=2 * eps, atol=atol)
        eps = torch.tensor(around.eps, dtype=torch.float64)
        given = {each.name: getattr(around, each.name) for each in fields(around)}
        by_op = OneRowProducts.fused(x, weight, biased, **{**given, "eps": eps})
        blocks = PLAIN_BLOCKS if around.norm_weight is None else NORMED_BLOCKS
        assert torch.equal(by_op, multiply_row(x, weight, biased, around, blocks))


@pytest.mark.parametrize(
    "around",
    [
        Around(norm_weight=torch.ones(9).half()),
        Around(norm_weight=torch.ones(8)),
        Around(residual=torch.ones(1, 8).half()),
        Around(gate="silu", residual=torch.ones(6).half()),
        Around(cos=torch.ones(4).half(), sin=torch.ones(4).half(), num_rotated=4),
        Around(cos=torch.ones(2).half(), sin=torch.ones(1).half(), num_rotated=4),
        Around(cos=torch.ones(2).half(), sin=torch.ones(2).half(), num_rotated=3),
    ],
)
def test_what_does_not_go_around_a_product(around) -> None:
    with pytest.raises(InvalidInput, match="around"):
        multiply_row(torch.zeros(1, 8).half(), torch.zeros(6, 8).half(), None, around)


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


def test_the_compiled_kernels_copy_ahead_without_spills(script) -> None:
    lines = script()
    assert len(lines) == len(FORMS)
    for facts in lines:
        assert facts["wide copies"] >= 8
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


WORD = "*bf16"
FORMS: dict[str, dict[str, str]] = {
    "plain": {"bias": WORD},
    "norm, gate": {"norm_weight": WORD},
    "residual": {"residual": WORD},
    "norm, rotary": {"norm_weight": WORD, "cos": WORD, "sin": WORD, "bias": WORD},
}


def main() -> None:
    from compile_kernel import compile_kernel, facts  # noqa: PLC0415  # not the interpreter's

    from attnmux.triton.kernels.one_row import multiply_row  # noqa: PLC0415  # as above

    optional = dict.fromkeys(("bias", "norm_weight", "residual", "cos", "sin"), "constexpr")
    always = {"x": WORD, "weight": WORD, "out": WORD, "eps": "fp32"}
    for name, words in FORMS.items():
        blocks = NORMED_BLOCKS if "norm" in name else PLAIN_BLOCKS
        compiled = compile_kernel(
            multiply_row,
            {**optional, **always, **words},
            {
                "NORM_OFFSET": 0.0,
                "GATE": "silu" if "gate" in name else None,
                "IS_EVEN": True,
                "BLOCK_N": blocks.rows,
                "BLOCK_K": blocks.columns,
                "STAGES": blocks.stages,
                "OVERLAPS": True,
            },
            options={"num_warps": blocks.warps, "launch_pdl": True},
        )
        ptx = compiled.asm["ptx"]
        waits = ptx.count("griddepcontrol.wait")
        counts = {
            "case": name,
            "waits": waits,
            "lets begin": ptx.count("griddepcontrol.launch_dependents"),
        }
        print(json.dumps({**facts(compiled), **counts}))


if __name__ == "__main__":
    main()
