"""What models do before and after a product of one row, found in the graphs of compiled layers.

What does not look as in `product_patterns.py` stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from attnmux.transformers.run.product_patterns import GATES, NORMS, match, rotated

aten, prims = torch.ops.aten, torch.ops.prims
Node = torch.fx.Node
Tensor = torch.Tensor


def fuse(graph: torch.fx.Graph, ops: Mapping[OpOverload, OpOverload]) -> None:
    """Replace products with what is around them.

    ops: by the op of a `LinearKernel`, its op for products with what is around them.
    """
    for product in [*graph.nodes]:
        if product.op == "call_function" and product.target in ops:
            _fuse(graph, product, ops[product.target])


def _fuse(graph: torch.fx.Graph, product: Node, op: OpOverload) -> None:
    x, weight, bias = product.args
    before = _norm_before(product)
    after, given = _after(product)
    if not before and not given:
        return
    with graph.inserting_before(after):
        arguments = (before.pop("x", x), weight, bias)
        fused = graph.call_function(op, arguments, {**before, **given})
    fused.meta.update(after.meta)
    after.replace_all_uses_with(fused)
    # What follows counts users
    graph.eliminate_dead_code()


def _norm_before(product: Node) -> dict[str, Any]:
    """x and the arguments of a norm whose only use is a product; nothing without one."""
    node = product.args[0]
    if not isinstance(node, Node) or len(node.users) > 1:
        return {}
    width, dtype = _value(node).shape[-1], _value(node).dtype
    for function, offset in NORMS:
        found = match(function, ("x", "weight", "eps"), node, width, dtype)
        if found is None:
            continue
        x, weight, eps = (found.kwargs[name] for name in ("x", "weight", "eps"))
        eps = _narrowed(eps)
        if eps is not None and _value(weight).dtype is _value(x).dtype is dtype:
            return {"x": x, "norm_weight": weight, "norm_offset": offset, "eps": eps}
    return {}


def _narrowed(eps: object) -> Node | None:
    """The number on the host that a norm adds, as a tensor [] of the graph's inputs."""
    if isinstance(eps, Node) and eps.target is prims.convert_element_type.default:
        eps = eps.args[0]
    if not isinstance(eps, Node) or eps.op != "placeholder":
        return None
    return None if _value(eps).dim() or _value(eps).device.type != "cpu" else eps


def _after(product: Node) -> tuple[Node, dict[str, Any]]:
    """The node that a product with what follows it replaces, and the arguments of what follows."""
    for find in (_residual_after, _gate_after, _rotation_after):
        found = find(product)
        if found is not None:
            return found
    return product, {}


def _residual_after(product: Node) -> tuple[Node, dict[str, Any]] | None:
    """A sum with rows of the same shape."""
    if len(product.users) != 1:
        return None
    (node,) = product.users
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    (other,) = [each for each in node.args if each is not product] or [None]
    if not isinstance(other, Node) or not _are_alike(other, product):
        return None
    return node, {"residual": other}


def _gate_after(product: Node) -> tuple[Node, dict[str, Any]] | None:
    """An activation of the first half, times the second half."""
    width, dtype = _value(product).shape[-1], _value(product).dtype
    half, parts = width // 2, _parts(product)
    if sorted(parts) != [(0, half), (half, width)]:
        return None
    halves = {"gate": parts[0, half], "up": parts[half, width]}
    for node in halves["up"].users:
        for name, function in GATES.items():
            found = match(function, ("gate", "up"), node, half, dtype)
            if found is not None and found.kwargs == halves:
                return node, {"gate": name}
    return None


def _rotation_after(product: Node) -> tuple[Node, dict[str, Any]] | None:
    """Rotated heads, from the first column on. Their nodes are replaced by the product's own, which
    then come rotated."""
    parts = _parts(product)
    rotations = {columns: _rotation_of(part) for columns, part in parts.items()}
    found = {columns: each for columns, each in rotations.items() if each is not None}
    starts, stops = zip(*sorted(found), strict=True) if found else ((), ())
    tables = {(cos, sin) for _, _, cos, sin in found.values()}
    if (0, *stops[:-1]) != starts or len(tables) != 1:
        return None
    if any(start < stops[-1] for start, _ in parts.keys() - found.keys()):
        return None
    for node, heads, _, _ in found.values():
        node.replace_all_uses_with(heads)
    ((cos, sin),) = tables
    return product, {"cos": cos, "sin": sin, "num_rotated": stops[-1]}


Rotation = tuple[Node, Node, Node, Node]


def _rotation_of(part: Node) -> Rotation | None:
    """(the result, its heads [1, H, 1, D], cos, sin) of columns of a product, if heads are all that
    they are, and the rotation is all that becomes of them."""
    heads = _only_user(_only_user(part, aten.reshape.default), aten.permute.default)
    if heads is None or _value(heads).dim() != 4 or _value(heads).shape[2] != 1:
        return None
    width, dtype = _value(heads).shape[-1], _value(heads).dtype
    for node in [second for first in heads.users for second in first.users]:
        found = match(rotated, ("x", "cos", "sin"), node, width, dtype)
        if found is None or found.kwargs["x"] is not heads:
            continue
        if not all(user in found.nodes for user in heads.users):
            return None
        cos, sin = (_table(found.kwargs[name], width, dtype) for name in ("cos", "sin"))
        return None if cos is None or sin is None else (node, heads, cos, sin)
    return None


def _table(node: object, width: int, dtype: torch.dtype) -> Node | None:
    """An input of the graph, if it has a value for each column."""
    if isinstance(node, Node) and node.target is aten.unsqueeze.default:
        node = node.args[0]
    if not isinstance(node, Node) or node.op != "placeholder":
        return None
    fits = _value(node).numel() == width and _value(node).dtype is dtype
    return node if fits else None


def _parts(product: Node) -> dict[tuple[int, int], Node]:
    """By their first column and the one after their last, the parts of the columns of a product
    that nothing else reads; none if something does."""
    parts = {}
    for user in product.users:
        splits = user.target is aten.split.Tensor
        for node in [*user.users] if splits else [user]:
            columns = _split_columns(node) if splits else _slice_columns(node)
            if columns is None or columns in parts:
                return {}
            parts[columns] = node
    return parts


def _slice_columns(node: Node) -> tuple[int, int] | None:
    if node.target is not aten.slice.Tensor or len(node.args) != 4:
        return None
    whole, dim, start, end = node.args
    return _within(whole, dim, start, end)


def _split_columns(node: Node) -> tuple[int, int] | None:
    split = node.args[0]
    whole, size, dim = (*split.args, 0)[:3] if isinstance(split, Node) else (None, None, None)
    index = node.args[1]
    if not isinstance(size, int) or not isinstance(index, int):
        return None
    return _within(whole, dim, index * size, (index + 1) * size)


def _within(whole: object, dim: object, start: object, end: object) -> tuple[int, int] | None:
    """The columns from `start` to `end` of the last dim."""
    if not isinstance(whole, Node) or not isinstance(start, int) or not isinstance(end, int):
        return None
    last, width = _value(whole).dim() - 1, _value(whole).shape[-1]
    is_part = dim in (-1, last) and 0 <= start < end
    return (start, min(end, width)) if is_part else None


def _only_user(node: Node | None, target: OpOverload) -> Node | None:
    users = [] if node is None else [*node.users]
    return users[0] if len(users) == 1 and users[0].target is target else None


def _are_alike(one: Node, other: Node) -> bool:
    first, second = _value(one), _value(other)
    return first.shape == second.shape and first.dtype is second.dtype


def _value(node: Any) -> Tensor:  # noqa: ANN401  # a node of a tensor
    value: Tensor = node.meta["val"]
    return value
