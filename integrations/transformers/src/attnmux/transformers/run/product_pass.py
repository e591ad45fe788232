"""The compiler's pass over the products of a layer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from hashlib import sha256

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._ops import OpOverload

from attnmux.transformers.run import fused_products, product_patterns

SHARED = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.t.default,
    torch.ops.aten.sym_size.int,
)
FUSING = fused_products, product_patterns


class ProductPass(CustomGraphPass):
    """Computes equal products once, which Inductor does in training alone, and those of a
    `LinearKernel` with what is around them."""

    def __init__(self, products: Mapping[OpOverload, OpOverload | None]) -> None:
        """products: ops of linear layers, in addition to torch's own, and for each the one with
        what is around the product."""
        self._shared = frozenset(products).union(SHARED)
        self._fused = {op: fused for op, fused in products.items() if fused is not None}

    def __call__(self, graph: torch.fx.Graph) -> None:
        self._share(graph)
        fused_products.fuse(graph, self._fused)

    def _share(self, graph: torch.fx.Graph) -> None:
        first: dict[object, torch.fx.Node] = {}
        for node in [*graph.nodes]:
            if node.op == "call_function" and node.target in self._shared:
                key = (node.target, str(node.args), str(node.kwargs))
                if key in first:
                    node.replace_all_uses_with(first[key])
                    graph.erase_node(node)
                else:
                    first[key] = node

    def uuid(self) -> bytes:
        """Changes with this code, so that compiled code of other passes is not taken for its."""
        sources = [inspect.getsource(each) for each in (type(self), *FUSING)]
        ops = sorted(map(str, self._shared | set(self._fused.values())))
        return sha256(f"{sources} {ops}".encode()).digest()
