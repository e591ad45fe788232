"""Kernels that one plugin offers to the backends of every other.

A distribution declares them as entry points of the group `attnmux.kernels`, named KERNEL.DEVICE
after the kernel and the type of torch device that it runs on:

    [project.entry-points."attnmux.kernels"]
    "kv_writer.cuda" = "acme.write:make_writer"

The entry point is a function of the `BackendContext`. It compiles the kernel by a launch that
changes nothing but the pool's slot 0, which is padding's. Plain torch operations serve if no kernel
is offered.

| kernel | the function returns |
|---|---|
| `chosen_pages` | `PageKernels`, as `SparseAttnBackend` calls them |
| `index_scores` | a `ScoresKeys` of attnmux-transformers, as `KeyPicker` calls it |
| `kv_writer` | a `KVWriter` of the context's pool |
| `linear` | a `LinearKernel` of attnmux-transformers, or None |
| `picked_blocks` | an `AttendsToBlocks`, as `PickedBlocksBackend` calls it |
| `rank_merger` | a `RankMerger` of attnmux-distributed |
| `short_convolutions` | a `ShortConvolutions` of the context's linear states |
| `topk_slots` | a function with the arguments and results of `topk_slots` |
| `draft_attention` | a `DraftAttention`, as `TreeAttnBackend` calls it |
| `draft_trees` | `TreeKernels` of attnmux-transformers |
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

from attnmux.core.adapters.library import KernelLibrary
from attnmux.core.contract.context import BackendContext
from attnmux.core.facts.errors import AttnmuxError, BackendFailed
from attnmux.core.find.plugins import admitted_points

GROUP = "attnmux.kernels"


def shared_kernel(name: str, context: BackendContext) -> Any:  # noqa: ANN401  # as the table says
    """The kernel that an installed plugin offers for the context's device, or None.

    Only plugins that the configuration admits count. Warns, and returns None, if a kernel cannot
    be imported or compiled, and if two plugins offer the same. A plugin whose compiler is not
    installed offers nothing.
    """
    wanted = f"{name}.{context.device.type}"
    points = admitted_points(GROUP, wanted)
    if len(points) > 1:
        owners = " and ".join(points)
        _warn(wanted, f"{owners} both offer it: deny one of them (deny_plugins)")
    if len(points) != 1:
        return None
    ((owner, point),) = points.items()
    try:
        factory: Any = point.load()
    except ModuleNotFoundError:
        return None
    except Exception as error:  # a plugin's module may raise anything
        _warn(wanted, f"{owner}: {AttnmuxError.in_brief(error)}")
        return None
    try:
        with KernelLibrary.trying(owner, context.device):
            return factory(context)
    except BackendFailed as error:
        _warn(wanted, str(error))
        return None


def with_shared_kernels(context: BackendContext) -> BackendContext:
    """The context with the `kv_writer` that is offered for its device, unless it has one."""
    if context.kv_writer is not None:
        return context
    writer = shared_kernel("kv_writer", context)
    return context if writer is None else replace(context, kv_writer=writer)


def _warn(wanted: str, reason: str) -> None:
    warnings.warn(f"{wanted} is not used, plain operations are: {reason}", stacklevel=3)
