"""Collectives of torch.distributed in recorded steps.

As on a device, a capture does not run them, so that ranks need not capture the same step, and a
replay runs them and waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

IN_PLACE = frozenset({"allreduce_", "broadcast_", "reduce_"})
WITH_OUTPUT = frozenset(
    {
        "_allgather_base_",
        "allgather_",
        "_reduce_scatter_base_",
        "reduce_scatter_",
        "alltoall_base_",
        "alltoall_",
    }
)
"""Their first argument receives the result."""


def is_collective(func: OpOverload[..., Any]) -> bool:
    """Whether an operation is one between ranks, such as a collective or a barrier."""
    return func.namespace in ("c10d", "_c10d_functional")


def refusal(func: OpOverload[..., Any]) -> tuple[str, str]:
    """Why a recording cannot repeat an operation between ranks, and a hint. Both are empty for a
    collective that it can repeat, and for other operations."""
    if not is_collective(func) or func._opname in IN_PLACE | WITH_OUTPUT:
        return "", ""
    if func._opname == "barrier":
        return "synchronises with the other ranks", "wait for them outside of the step"
    hint = "call collectives of torch.distributed, such as all_reduce and all_gather_into_tensor"
    return "is an operation between ranks that no recording repeats", hint


def queue(func: OpOverload[..., Any], args: tuple[Any, ...]) -> Any:  # noqa: ANN401  # as the operation's
    """The result of a collective that a capture does not run.

    Its output holds zeros, since the recorded step writes to the KV pool what it computes from it.
    """
    # Here, since a build of torch may have no collectives
    from torch._C import _distributed_c10d as c10d  # noqa: PLC0415

    if func._opname in WITH_OUTPUT:
        for tensor in pytree.tree_leaves(args[0]):
            tensor.zero_()
    done: torch.futures.Future[None] = torch.futures.Future()
    done.set_result(None)
    work = c10d._create_work_from_future(done).boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


def replayed(func: OpOverload[..., Any]) -> Callable[..., Any]:
    """The operation as a replay calls it: a collective is complete when it returns."""
    return partial(_run, func) if is_collective(func) else func


def _run(
    func: OpOverload[..., Any],
    *args: Any,  # noqa: ANN401  # the operation's own
    **kwargs: Any,  # noqa: ANN401  # likewise
) -> Any:  # noqa: ANN401  # as the operation's
    from torch._C._distributed_c10d import Work  # noqa: PLC0415  # as in `queue`

    results = func(*args, **kwargs)
    for leaf in pytree.tree_leaves(results):
        if isinstance(leaf, torch.ScriptObject):
            Work.unbox(leaf).wait()
    return results
