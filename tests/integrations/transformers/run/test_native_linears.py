"""A model's linear layers by a kernel that a plugin offers."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnmux.transformers.run.linears import multiply_by


class Doubled:
    """A kernel that can be told from torch's."""

    op = fused = None

    def rows(self, weight: torch.Tensor) -> range:
        return range(2, 4) if weight.shape[1] == 16 else range(0)

    def __call__(self, x, weight, bias):
        return 2 * torch.nn.functional.linear(x, weight, bias)


class Other(torch.nn.Linear):
    pass


def test_plain_layers_that_the_kernel_serves_call_it() -> None:
    plain, wide, other, own = model = torch.nn.Sequential(
        torch.nn.Linear(16, 4), torch.nn.Linear(32, 4), Other(16, 4), torch.nn.Linear(16, 4)
    )
    own.forward = lambda x: x  # type: ignore[method-assign]  # as absorbed layers have one
    x = torch.randn(3, 16)
    multiply_by(Doubled(), model)
    with torch.no_grad():
        torch.testing.assert_close(plain(x), 2 * (x @ plain.weight.T + plain.bias))
        torch.testing.assert_close(other(x), x @ other.weight.T + other.bias)
        torch.testing.assert_close(wide(x.repeat(1, 2)), x.repeat(1, 2) @ wide.weight.T + wide.bias)
        for rows in (x[:1], x[None, :1], x.repeat(2, 1)):  # others than the kernel's
            torch.testing.assert_close(plain(rows), rows @ plain.weight.T + plain.bias)
        assert own(x) is x
    # With gradients, with other dtypes under autocast, and in compiled code torch multiplies
    torch.testing.assert_close(plain(x), x @ plain.weight.T + plain.bias)
    with torch.no_grad():
        compiled = torch.compile(plain, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), x @ plain.weight.T + plain.bias)


@torch.library.custom_op("attnmux_test::tripled", mutates_args=())
def tripled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return 3 * torch.nn.functional.linear(x, weight, bias)


@tripled.register_fake
def _(x, weight, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


class DoubledOrTripled(Doubled):
    """In compiled code it can be told from eager code."""

    op = torch.ops.attnmux_test.tripled.default

    def rows(self, weight: torch.Tensor) -> range:
        return range(1, 2)


def test_compiled_code_calls_the_kernels_op() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 4))
    multiply_by(DoubledOrTripled(), model)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=keep, fullgraph=True, dynamic=True)
    x = torch.randn(1, 5, 16)
    with torch.no_grad():
        by_torch = x @ model[0].weight.T + model[0].bias
        torch.testing.assert_close(model(x[:, :1]), 2 * by_torch[:, :1])
        for num_rows in (1, 2, 3, 5, 1):
            factor = 3 if num_rows == 1 else 1
            rows = slice(0, num_rows)
            torch.testing.assert_close(compiled(x[:, rows]), factor * by_torch[:, rows])
    assert len(graphs) == 2  # one row, and more


class Records(TorchDispatchMode):
    """Notes operations, as what repeats them does."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_recorded_operations_include_the_product() -> None:
    x = torch.randn(1, 16)
    for kernel, factor in ((DoubledOrTripled(), 3), (Doubled(), 1)):
        model = torch.nn.Sequential(torch.nn.Linear(16, 4))
        multiply_by(kernel, model)
        rows = x.repeat(kernel.rows(model[0].weight).start, 1)
        with torch.no_grad(), Records() as records:
            found = model(rows)
        by_torch = rows @ model[0].weight.T + model[0].bias
        torch.testing.assert_close(found, factor * by_torch)
        product = kernel.op or torch.ops.aten.addmm.default
        assert product in records.ops
