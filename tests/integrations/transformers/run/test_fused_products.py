"""Products of one row take in what is around them, where a graph has what models write."""

from __future__ import annotations

import shutil
from typing import ClassVar

import pytest
import torch

from attnmux.transformers import SequenceState
from attnmux.transformers.run import product_patterns
from attnmux.transformers.run.linears import KernelLinear, multiply_by, product_ops
from attnmux.transformers.run.product_pass import ProductPass

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
    pytest.mark.usefixtures("_forget_graphs"),
]


@pytest.fixture
def _forget_graphs():
    torch._dynamo.reset()
    Fusing.calls.clear()
    yield
    torch._dynamo.reset()


@torch.library.custom_op("attnmux_test::fusing", mutates_args=())
def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    Fusing.calls.append({})
    return torch.nn.functional.linear(x, weight, bias)


@plain.register_fake
def _(x, weight, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("attnmux_test::fused", mutates_args=())
def fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_offset: float = 0.0,
    eps: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gate: str | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    num_rotated: int = 0,
) -> torch.Tensor:
    call = {
        "norm": None if norm_weight is None else norm_offset,
        "residual": None if residual is None else True,
        "gate": gate,
        "num_rotated": num_rotated or None,
    }
    Fusing.calls.append({name: value for name, value in call.items() if value is not None})
    wide = x.double()
    if norm_weight is not None:
        wide = wide * (wide.square().mean() + eps).rsqrt() * (norm_weight.double() + norm_offset)
    product = torch.nn.functional.linear(
        wide, weight.double(), None if bias is None else bias.double()
    )
    if residual is not None:
        product = product + residual.double()
    if gate is not None:
        low, high = product.chunk(2, -1)
        product = product_patterns.ACTIVATIONS[gate](low) * high
    if cos is not None:
        dim = cos.shape[-1]
        heads = product[..., :num_rotated].reshape(-1, dim)
        turned = product_patterns.rotated(heads, cos.double().view(dim), sin.double().view(dim))
        product = torch.cat([turned.view(*x.shape[:-1], -1), product[..., num_rotated:]], -1)
    return product.to(x.dtype)


@fused.register_fake
def _(x, weight, bias=None, norm_weight=None, norm_offset=0.0, eps=None, residual=None, gate=None,
      cos=None, sin=None, num_rotated=0):  # fmt: skip
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (1 if gate is None else 2)))


class Fusing:
    """A kernel for one row that notes what it is called with."""

    op = torch.ops.attnmux_test.fusing.default
    fused = torch.ops.attnmux_test.fused.default
    calls: ClassVar[list[dict[str, object]]] = []

    def rows(self, weight):
        return range(1, 2)

    def __call__(self, x, weight, bias):
        return plain(x, weight, bias)


class Norm(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.eps = function, 0.01
        self.weight = torch.nn.Parameter(torch.randn(16))

    def forward(self, x):
        return self.function(x, self.weight, self.eps)


class Layer(torch.nn.Module):
    """A norm, projections to rows of the same width, and what a test does with them."""

    def __init__(self, after, norm=product_patterns.norm, num_out=16) -> None:
        super().__init__()
        self.norm, self.after = Norm(norm), after
        self.product = torch.nn.Linear(16, num_out)

    def forward(self, x, *others):
        normed = self.norm(x)
        return self.after(x, normed, self.product(normed), *others)


def heads(product, start, stop):
    return product[..., start:stop].view(1, 1, -1, 4).transpose(1, 2)


def rotate(x, normed, product, cos, sin, order=(0, 1)):
    """Queries of two heads and keys of one; `order`: of the parts that are rotated."""
    parts = [heads(product, 0, 8), heads(product, 8, 12), heads(product, 12, 16)]
    for part in order:
        parts[part] = product_patterns.rotated(parts[part], cos.unsqueeze(1), sin.unsqueeze(1))
    return [part.transpose(1, 2).contiguous() for part in parts]


def gate(name):
    return lambda x, normed, product: product_patterns.gated(
        name, product[..., :8], product[..., 8:]
    )


FUSED = {
    "residual": (Layer(lambda x, normed, product: x + product), {"residual": True}),
    "the other way": (Layer(lambda x, normed, product: product + x), {"residual": True}),
    "norm from one": (
        Layer(lambda x, normed, product: product, product_patterns.norm_from_one),
        {"norm": 1.0},
    ),
    **{name: (Layer(gate(name)), {"gate": name}) for name in product_patterns.ACTIVATIONS},
    "gate of chunks": (
        Layer(lambda x, normed, p: product_patterns.gated("silu", *p.chunk(2, -1))),
        {"gate": "silu"},
    ),
    "rotary": (Layer(rotate), {"num_rotated": 12}),
}
LEFT = {
    "norm that others read": (Layer(lambda x, normed, product: (product, normed)), {}),
    "product that others read": (Layer(lambda x, normed, p: (x + p, 2 * p)), {"norm": 0.0}),
    "residual of more values": (
        Layer(lambda x, normed, p: p + p.new_ones(2, 1, 16)),
        {"norm": 0.0},
    ),
    "gate of the second half": (
        Layer(lambda x, normed, p: product_patterns.gated("silu", *p.chunk(2, -1)[::-1])),
        {"norm": 0.0},
    ),
    "other heads rotated": (Layer(lambda *args: rotate(*args, order=(1,))), {"norm": 0.0}),
    "rotated heads that others read": (
        Layer(lambda x, normed, p, *tables: [*rotate(x, normed, p, *tables), p[..., 4:6]]),
        {"norm": 0.0},
    ),
    "a norm without its root": (
        Layer(lambda x, normed, p: p, lambda x, weight, eps: weight * (x * (x.mean() + eps))),
        {},
    ),
}


def compiled(layer, dtype):
    layer = layer.to(dtype)
    multiply_by(Fusing(), layer)
    options = {"post_grad_custom_pre_pass": ProductPass(product_ops(layer))}
    return torch.compile(layer, dynamic=True, fullgraph=True, options=options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*FUSED, *LEFT])
@pytest.mark.turns(8, suite="inductor")
def test_what_is_around_a_product(name, dtype) -> None:
    layer, call = {**FUSED, **LEFT}[name]
    expected_call = call if name in LEFT else {"norm": 0.0, **call}
    tables = [torch.randn(1, 1, 4).to(dtype) for _ in range(2)]
    given = tables if "rotated" in name or name == "rotary" else []
    x = torch.randn(1, 1, 16).to(dtype)
    with torch.no_grad():
        expected = layer.to(dtype)(x, *given)
        found = compiled(layer, dtype)(x, *given)
    for ours, theirs in zip(_each(found), _each(expected), strict=True):
        limit = 16 * torch.finfo(dtype).eps
        torch.testing.assert_close(ours, theirs, rtol=limit, atol=limit)
    assert Fusing.calls[-1] == expected_call


def _each(results):
    return [results] if isinstance(results, torch.Tensor) else results


MODELS = {
    "llama": (
        {"norm": 0.0, "num_rotated": 48},
        {"residual": True},
        {"norm": 0.0, "gate": "silu"},
        {"residual": True},
    ),
    "qwen3": (
        {"norm": 0.0},
        {"residual": True},
        {"norm": 0.0, "gate": "silu"},
        {"residual": True},
    ),
    "gemma2": (
        {"norm": 1.0, "num_rotated": 96},
        {},
        {"norm": 1.0, "gate": "gelu_tanh"},
        {},
    ),
}
"""The products of each layer. A norm comes between product and rotation in Qwen 3, and between
product and sum in Gemma 2."""


def greedy(runner, steps):
    state = SequenceState(token_ids=[5, 80, 17, 3, 44])
    logits = [runner.extend([state])]
    for _ in range(steps):
        state.token_ids.append(int(logits[-1].argmax()))
        logits.append(runner.decode([state]).clone())
    runner.release([state])
    return torch.cat(logits)


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.turns(2, suite="inductor")
def test_layers_of_models(tiny, run_on, architecture) -> None:
    folder = tiny(architecture)[1]
    options = {"page_size": 16, "debug": False, "graph": False}
    expected = greedy(run_on(folder, **options), 6)
    runner = run_on(folder, **options)
    for layer in runner.model.modules():
        if isinstance(layer, KernelLinear):  # of this CPU
            layer.__class__ = torch.nn.Linear
    multiply_by(Fusing(), runner.model)
    runner.compile()
    Fusing.calls.clear()
    found = greedy(runner, 6)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    layers = list(MODELS[architecture]) * runner.model.config.num_hidden_layers
    assert Fusing.calls[-len(layers) - 1 :] == [*layers, {}]
