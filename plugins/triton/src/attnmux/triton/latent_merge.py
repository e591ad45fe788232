"""Merges the partial results that `attend_latent` leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnmux.triton.bound_kernel import BoundKernel
from attnmux.triton.dispatch import kernel_at
from attnmux.triton.layer import TritonLayer
from attnmux.triton.operands import Results

if TYPE_CHECKING:
    from attnmux.triton.shares import SharePlan

KERNEL = "attnmux.triton.kernels.latent_merge"


class LatentMerge:
    """The launches of `merge_latent` for a layer and a plan."""

    def __init__(self, layer: TritonLayer, plan: SharePlan) -> None:
        self._layer, self._plan = layer, plan
        self._of_batches: dict[tuple[int, bool], tuple[BoundKernel, int]] = {}
        self._bound: dict[tuple[bool, tuple[int, ...]], BoundKernel] = {}

    def __call__(self, batch_size: int, results: Results) -> None:
        out, lse = results
        batch = batch_size, lse is None
        found = self._of_batches.get(batch)
        if found is None:
            found = self._of_batches[batch] = self._of(batch_size, has_lse=lse is not None)
        bound, slices = found
        bound(
            (batch_size * self._plan.key.items, slices, 1),
            results,
            (out.stride()[0], 0 if lse is None else lse.stride()[0]),
        )

    def _of(self, batch_size: int, *, has_lse: bool) -> tuple[BoundKernel, int]:
        """The kernel for a batch, and the slices of an item."""
        layer, plan, key = self._layer, self._plan, self._plan.key
        # The slices decide the order in which parts are added up. Where the batch must not matter,
        # they depend on one request alone.
        items = key.items if key.splitting is not None else batch_size * key.items
        slices, constants = kernel_at(f"{KERNEL}:merge_slices")(
            items, key.part_rows, plan.programs // key.config.programs_per_unit
        )
        kind = has_lse, tuple(constants.values())
        if kind not in self._bound:
            self._bound[kind] = BoundKernel(
                layer.launcher,
                kernel_at(f"{KERNEL}:merge_latent"),
                {
                    **plan.buffers,
                    "v_scale": layer.scales[1],
                    "GROUP": layer.shape.group,
                    "QUERIES": key.queries,
                    "IS_FIXED": key.splitting is not None,
                    "PART_ROWS": key.part_rows,
                    **constants,
                },
                tensors=("out", "lse"),
                numbers=("out_stride", "lse_stride"),
                # It begins while `attend_latent` ends, and waits for its results.
                options={"num_warps": 8, "launch_pdl": True},
            )
        return self._bound[kind], slices
