"""What is launched behind `attend_latent`."""

from __future__ import annotations

from attnmux.triton.launching import BoundKernel, Launcher
from attnmux.triton.operands import Results
from attnmux.triton.plans import SharePlan
from attnmux.triton.serving import kernel_at

MERGE = "attnmux.triton.kernels.latent_merge"


class LatentMerge:
    """Merges what the programs of a plan left in parts."""

    def __init__(self, launcher: Launcher, plan: SharePlan, group: int, v_scale: float) -> None:
        """group: query heads. v_scale: what values are multiplied by."""
        self._launcher, self._plan = launcher, plan
        self._group, self._v_scale = group, v_scale
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
            (out, lse),
            (out.stride()[0], 0 if lse is None else lse.stride()[0]),
        )

    def _of(self, batch_size: int, *, has_lse: bool) -> tuple[BoundKernel, int]:
        """The kernel for a batch, and slices of an item."""
        plan, key = self._plan, self._plan.key
        # The slices say in which order parts are added up: where the batch must not matter, neither
        # does its size.
        items = key.items if key.splitting is not None else batch_size * key.items
        slices, constants = kernel_at(f"{MERGE}:merge_slices")(
            items, key.part_rows, plan.programs // key.launch.programs_per_unit
        )
        kind = has_lse, tuple(constants.values())
        if kind not in self._bound:
            fixed = {
                "stops": plan.stops,
                "share": plan.share,
                "partial": plan.partial,
                "partial_lse": plan.partial_lse,
                "v_scale": self._v_scale,
                "GROUP": self._group,
                "QUERIES": key.queries,
                "IS_FIXED": key.splitting is not None,
                "PART_ROWS": key.part_rows,
                **constants,
            }
            self._bound[kind] = BoundKernel(
                self._launcher,
                kernel_at(f"{MERGE}:merge_latent"),
                fixed,
                tensors=("out", "lse"),
                numbers=("out_stride", "lse_stride"),
                # It begins while `attend_latent` ends, and waits for what that writes.
                options={"num_warps": 8, "launch_pdl": True},
            )
        return self._bound[kind], slices
