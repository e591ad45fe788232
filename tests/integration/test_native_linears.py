"""A model's linear layers by a kernel that a plugin offers."""

from __future__ import annotations

import torch

from attnmux.transformers.linears import multiply_by


class Doubled:
    """A kernel that can be told from torch's."""

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
