"""Plans of captured graphs: one wrapper for each batch size, over buffers that all sizes share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from attnmux.core import BackendContext, ForwardBatch
from attnmux.nvidia.flashinfer.layers import PlanGroup, View
from attnmux.nvidia.flashinfer.planning import (
    Planner,
    check_served,
    has_decode_kernel,
    keys_view,
)
from attnmux.nvidia.flashinfer.settings import graph_plan_bytes
from attnmux.nvidia.flashinfer.shared import CaptureKey, capture_key
from attnmux.nvidia.flashinfer.step import FlashInferStep, Role, Wrappers


class GraphPlans:
    """The wrappers of every captured batch."""

    def __init__(
        self,
        planner: Planner,
        context: BackendContext,
        groups: Sequence[PlanGroup],
        *,
        max_batch_size: int,
        max_num_tokens: int,
    ) -> None:
        settings, request = planner.settings, context.request
        masked = request.custom_mask or request.has_trees
        page_size, tokens = settings.page_size, -(-max_num_tokens // max_batch_size)
        views = {group.view for group in groups}
        if masked:
            views |= {group.all_keys for group in groups}

        def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            with torch.inference_mode(False):
                return torch.zeros(count, dtype=dtype, device=context.device)

        def pages(view: View) -> int:
            keys = context.max_context_len
            if view.window >= 0:
                keys = min(keys, view.window + tokens + page_size)
            return -(-keys // page_size)

        mask_bits = max_num_tokens * context.max_context_len if masked else 0
        self._planner = planner
        self._groups = groups
        self._indptr = {view: zeros(max_batch_size + 1) for view in views}
        self._last_page_len = {view: zeros(max_batch_size) for view in views}
        self._indices = {view: zeros(max_batch_size * pages(view)) for view in views}
        self._qo_indptr = zeros(max_batch_size + 1)
        self._mask = zeros(mask_bits // 8 + max_batch_size, torch.uint8)
        self._mask_indptr = zeros(max_batch_size + 1)
        # The int workspace of each group. Sizes share it: each replay plans anew, and one step is
        # in flight. A wrapper pins as much on the host, so it is no larger than plans are: the
        # library's own 8 MiB would come to 184 for 23 sizes.
        self._plans = {
            group: zeros(graph_plan_bytes(group, max_batch_size, max_num_tokens), torch.uint8)
            for group in groups
        }
        self._captured: dict[CaptureKey, Wrappers] = {}

    def has(self, batch: ForwardBatch) -> bool:
        """Whether the batch was captured."""
        return capture_key(batch) in self._captured

    def capture(self, step: FlashInferStep) -> Wrappers:
        """The wrappers of all groups, planned for a step that is about to be captured.

        Raises InvalidInput for a step that the kernels do not serve.
        """
        key, size, (role,) = capture_key(step.batch), step.batch.batch_size, step.in_pool
        if key not in self._captured:
            for group in self._groups:
                check_served(role, group, has_items=step.batch.multi_item is not None)
            self._captured[key] = {
                (role, number): self._make(role, group, size)
                for number, group in enumerate(self._groups)
            }
        wrappers = self._captured[key]
        for (role, number), wrapper in wrappers.items():
            self._planner.plan(wrapper, role, self._groups[number], step, self._indices)
        return wrappers

    def replan(self, step: FlashInferStep) -> Wrappers:
        """The wrappers of a captured batch, planned for its next replay."""
        wrappers = self._captured[capture_key(step.batch)]
        for (role, number), wrapper in wrappers.items():
            group = self._groups[number]
            if has_decode_kernel(role, group):
                self._replan_decode(wrapper, group, step)
            else:
                self._planner.plan(wrapper, role, group, step, self._indices)
        return wrappers

    def _replan_decode(self, wrapper: Any, group: PlanGroup, step: FlashInferStep) -> None:  # noqa: ANN401  # the library's class
        """Fill the buffers and run the planner alone, without the copies of `plan`."""
        view, size = group.view, step.batch.batch_size
        keys = step.keys(view, self._indices)
        indptr = self._indptr[view][: size + 1].copy_(keys.indptr, non_blocking=True)
        self._last_page_len[view][:size].copy_(keys.last_page_len, non_blocking=True)
        self._planner.replan_decode(wrapper, group, indptr, keys)

    def _make(self, role: Role, group: PlanGroup, size: int) -> Any:  # noqa: ANN401  # the library's class
        view = keys_view(role, group)
        suffix = "buffer" if has_decode_kernel(role, group) else "buf"
        buffers = {
            "use_cuda_graph": True,
            f"paged_kv_indptr_{suffix}": self._indptr[view][: size + 1],
            f"paged_kv_indices_{suffix}": self._indices[view],
            f"paged_kv_last_page_len_{suffix}": self._last_page_len[view][:size],
        }
        if not has_decode_kernel(role, group):
            buffers["qo_indptr_buf"] = self._qo_indptr[: size + 1]
        if role is Role.MASKED:
            # Given these, a wrapper applies a mask in every run.
            buffers["custom_mask_buf"] = self._mask
            buffers["mask_indptr_buf"] = self._mask_indptr[: size + 1]
        wrapper = self._planner.make(role, group, **buffers)
        wrapper.reset_workspace_buffer(self._planner.workspace, self._plans[group])
        return wrapper
