"""Plans of captured graphs: one wrapper for each batch size, over buffers that all sizes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.context import BackendContext
from attnmux.nvidia.flashinfer.groups import PlanGroup, View
from attnmux.nvidia.flashinfer.kernels import Kernels
from attnmux.nvidia.flashinfer.planning import (
    LAYOUT,
    Role,
    check_served,
    constants,
    has_decode_kernel,
    keys_view,
    plan_decode,
    plan_paged,
    prefill_backend,
)
from attnmux.nvidia.flashinfer.settings import Settings, graph_plan_bytes
from attnmux.nvidia.flashinfer.sinks import jit_arguments
from attnmux.nvidia.flashinfer.step import Keys, Step

Wrappers = dict[PlanGroup, Any]
_Key = tuple[ForwardMode, int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Buffers:
    """What kernels in graphs read, for the largest batch."""

    indptr: dict[View, torch.Tensor]
    last_page_len: dict[View, torch.Tensor]
    indices: dict[View, torch.Tensor]
    qo_indptr: torch.Tensor
    mask: torch.Tensor
    mask_indptr: torch.Tensor
    of_plans: dict[PlanGroup, torch.Tensor] = field(default_factory=dict)
    """The int workspace of each group. Sizes share it: each replay plans anew, and one step is in
    flight. A wrapper pins as much on the host, so it is no larger than plans are: the library's own
    8 MiB would come to 184 for 23 sizes."""


class GraphPlans:
    """The wrappers of every captured batch, recognised by the address of its tensors."""

    def __init__(
        self,
        kernels: Kernels,
        settings: Settings,
        context: BackendContext,
        groups: Sequence[PlanGroup],
        *,
        workspace: torch.Tensor,
        max_batch_size: int,
        max_num_tokens: int,
    ) -> None:
        self._kernels = kernels
        self._settings = settings
        self._groups = tuple(groups)
        self._workspace = workspace
        self._buffers = _allocate(settings, context, groups, max_batch_size, max_num_tokens)
        self._captured: dict[_Key, tuple[Role, Wrappers]] = {}
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens

    def has_room(self, max_batch_size: int, max_num_tokens: int) -> bool:
        """Whether the buffers are large enough for these sizes too."""
        return max_batch_size <= self._max_batch_size and max_num_tokens <= self._max_num_tokens

    def prepare(self, batch: ForwardBatch, step: Step, role: Role) -> Wrappers:
        """Plan a batch that is about to be captured."""
        for group in self._groups:
            check_served(role, group, batch)
        captured = self._captured.get(_key(batch))
        if captured is None:
            wrappers = {group: self._make(role, group, batch.batch_size) for group in self._groups}
            captured = self._captured[_key(batch)] = (role, wrappers)
        for group, wrapper in captured[1].items():
            keys = step.keys(keys_view(role, group), self._buffers.indices)
            if has_decode_kernel(role, group):
                plan_decode(wrapper, group, self._settings, keys)
            else:
                plan_paged(wrapper, role, group, self._settings, step, keys)
        return captured[1]

    def replan(self, batch: ForwardBatch, step: Step) -> Wrappers | None:
        """Plan a captured batch for its next replay; None for a batch that was not captured."""
        captured = self._captured.get(_key(batch))
        if captured is None:
            return None
        role, wrappers = captured
        for group, wrapper in wrappers.items():
            view = keys_view(role, group)
            keys = step.keys(view, self._buffers.indices)
            if has_decode_kernel(role, group):
                self._replan_decode(wrapper, group, view, keys)
            else:
                plan_paged(wrapper, role, group, self._settings, step, keys)
        return wrappers

    def _replan_decode(self, wrapper: Any, group: PlanGroup, view: View, keys: Keys) -> None:  # noqa: ANN401  # the library's class
        """Fill the buffers and run the planner alone, without the copies of `plan`.

        last_page_len stays on the host: the library reads it there and nowhere else.
        """
        size = len(keys.last_page_len)
        self._buffers.indptr[view][: size + 1].copy_(keys.indptr, non_blocking=True)
        self._buffers.last_page_len[view][:size].copy_(keys.last_page_len, non_blocking=True)
        self._kernels.fast_decode_plan(
            wrapper,
            self._buffers.indptr[view][: size + 1],
            keys.indices,
            keys.last_page_len,
            group.num_q_heads,
            group.num_kv_heads,
            group.head_dim,
            self._settings.page_size,
            kv_data_type=self._settings.kv_dtype,
            global_override_indptr_cpu=keys.indptr,
            **constants(group, self._settings, group.window),
        )

    def _make(self, role: Role, group: PlanGroup, size: int) -> Any:  # noqa: ANN401  # the library's class
        buffers, view = self._buffers, keys_view(role, group)
        if has_decode_kernel(role, group):
            wrapper = self._kernels.decode(
                self._workspace,
                LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=self._settings.tensor_cores,
                paged_kv_indptr_buffer=buffers.indptr[view][: size + 1],
                paged_kv_indices_buffer=buffers.indices[view],
                paged_kv_last_page_len_buffer=buffers.last_page_len[view][:size],
                backend=self._settings.decode_backend,
            )
        else:
            masks: dict[str, torch.Tensor] = {}
            if role is Role.MASKED:
                # Given these, a wrapper applies a mask in every run.
                masks = {
                    "custom_mask_buf": buffers.mask,
                    "mask_indptr_buf": buffers.mask_indptr[: size + 1],
                }
            wrapper = self._kernels.paged(
                self._workspace,
                LAYOUT,
                use_cuda_graph=True,
                qo_indptr_buf=buffers.qo_indptr[: size + 1],
                paged_kv_indptr_buf=buffers.indptr[view][: size + 1],
                paged_kv_indices_buf=buffers.indices[view],
                paged_kv_last_page_len_buf=buffers.last_page_len[view][:size],
                backend=prefill_backend(role, group, self._settings),
                **jit_arguments(self._kernels, group, self._settings),
                **masks,
            )
        wrapper.reset_workspace_buffer(self._workspace, buffers.of_plans[group])
        return wrapper


def _key(batch: ForwardBatch) -> _Key:
    return batch.forward_mode, batch.batch_size, batch.req_pool_indices.data_ptr()


def _allocate(
    settings: Settings,
    context: BackendContext,
    groups: Sequence[PlanGroup],
    max_batch_size: int,
    max_num_tokens: int,
) -> _Buffers:
    device, page_size = context.device, settings.page_size
    tokens = -(-max_num_tokens // max_batch_size)
    masked = context.request.custom_mask
    views = {group.view for group in groups}
    if masked:
        views |= {group.all_keys for group in groups}

    def zeros(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.zeros(count, dtype=dtype, device=device)

    def pages(view: View) -> int:
        keys = context.max_context_len
        if view.window >= 0:
            keys = min(keys, view.window + tokens + page_size)
        return -(-keys // page_size)

    mask_bits = max_num_tokens * context.max_context_len if masked else 0
    return _Buffers(
        indptr={view: zeros(max_batch_size + 1) for view in views},
        last_page_len={view: zeros(max_batch_size) for view in views},
        indices={view: zeros(max_batch_size * pages(view)) for view in views},
        qo_indptr=zeros(max_batch_size + 1),
        mask=zeros(mask_bits // 8 + max_batch_size, torch.uint8),
        mask_indptr=zeros(max_batch_size + 1),
        of_plans={
            group: zeros(graph_plan_bytes(group, max_batch_size, max_num_tokens), torch.uint8)
            for group in groups
        },
    )
