"""The library's wrappers: their purposes, and how they are made and planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnmux.core import InvalidInput
from attnmux.nvidia.flashinfer.layers import PlanGroup, View
from attnmux.nvidia.flashinfer.settings import Settings
from attnmux.nvidia.flashinfer.step import FlashInferStep, Keys, Role

LAYOUT = "NHD"
"""[pages, page_size, heads, dim], as in the pools."""

SINKS_BACKEND = "fa2"
"""The kernels that are compiled with sinks."""

NO_POSITIONS = 0
"""`PosEncodingMode.NONE`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashInferKernels:
    """Classes, functions and sources of flashinfer, by the library's names."""

    BatchDecodeWithPagedKVCacheWrapper: Callable[..., Any]
    BatchPrefillWithPagedKVCacheWrapper: Callable[..., Any]
    BatchPrefillWithRaggedKVCacheWrapper: Callable[..., Any]
    merge_state_in_place: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    """(v, s, v_other, s_other): (v, s) becomes the state of both, with base-2 LSE."""
    fast_decode_plan: Callable[..., None]
    """`plan` of a decode wrapper over fixed buffers that the caller fills."""
    attention_sink_decl: Mapping[str, str]
    """By backend, the source of a softmax with sinks. fa2's adds the sink to a row's sum in the
    first part of the keys alone, and to LSE with it; a row without keys has output 0 and the sink
    as LSE. It looks at windows and causality, not at custom masks, items or the logit cap."""
    get_batch_prefill_attention_sink_uri: Callable[..., str]
    """The name of the compiled module, one for each dtype, dim and kind of window."""


WITHOUT_SINKS = {
    Role.RAGGED: "attention to K and V of the call alone",
    Role.MASKED: "a step with a custom mask",
    Role.ITEMS: "a step of many items",
}
"""Roles whose kernels look at no sinks."""


def check_served(role: Role, group: PlanGroup, *, has_items: bool) -> None:
    """Raises InvalidInput for features that the kernels of a role ignore."""
    if group.has_sinks and group.logit_cap > 0:
        raise InvalidInput(
            "layer.logit_cap",
            got=f"{group.logit_cap:g} and sinks",
            expected="0: flashinfer's softmax with sinks has no cap",
        )
    if group.has_sinks and role in WITHOUT_SINKS:
        raise InvalidInput(
            "layer.sinks",
            got=f"sinks in {WITHOUT_SINKS[role]}",
            expected="None: flashinfer's softmax with sinks reads the pool, without such a mask",
        )
    if role is Role.RAGGED and has_items and not group.view.cross:
        raise InvalidInput(
            "multi_item",
            got="many items over K and V of the call alone",
            expected="None, or K and V in the pool: save_kv_cache=True",
        )


def has_decode_kernel(role: Role, group: PlanGroup) -> bool:
    """Whether the library's decode wrapper serves; only the prefill wrapper knows sinks."""
    return role is Role.DECODE and not group.has_sinks


def keys_view(role: Role, group: PlanGroup) -> View:
    """The keys that a plan over the pool reads."""
    if role in (Role.MASKED, Role.ITEMS):
        return group.all_keys
    return replace(group.view, prefix=True) if role is Role.PREFIX else group.view


class Planner:
    """Makes wrappers, over one scratch memory, and plans them."""

    def __init__(
        self, kernels: FlashInferKernels, settings: Settings, workspace: torch.Tensor
    ) -> None:
        self.kernels = kernels
        self.settings = settings
        self.workspace = workspace
        self._eager: dict[tuple[Role, PlanGroup], Any] = {}

    def plan_eager(self, role: Role, group: PlanGroup, step: FlashInferStep) -> Any:  # noqa: ANN401  # the library's class
        """The role's wrapper for eager steps, planned for this one. The first plan makes it."""
        check_served(role, group, has_items=step.batch.multi_item is not None)
        wrapper = self._eager.get((role, group))
        if wrapper is None:
            wrapper = self._eager[role, group] = self.make(role, group)
        self.plan(wrapper, role, group, step)
        return wrapper

    def make(self, role: Role, group: PlanGroup, **buffers: Any) -> Any:  # noqa: ANN401  # the library's class
        """buffers: arguments of a wrapper for graphs."""
        kernels, settings = self.kernels, self.settings
        if has_decode_kernel(role, group):
            return kernels.BatchDecodeWithPagedKVCacheWrapper(
                self.workspace,
                LAYOUT,
                use_tensor_cores=settings.tensor_cores,
                backend=settings.decode_backend,
                **buffers,
            )
        if role is Role.RAGGED:
            make = kernels.BatchPrefillWithRaggedKVCacheWrapper
        else:
            make = kernels.BatchPrefillWithPagedKVCacheWrapper
        backend, jit = self._prefill_backend(role, group), self._jit_arguments(group)
        return make(self.workspace, LAYOUT, backend=backend, **jit, **buffers)

    def plan(
        self,
        wrapper: Any,  # noqa: ANN401  # the library's class
        role: Role,
        group: PlanGroup,
        step: FlashInferStep,
        buffers: Mapping[View, torch.Tensor] | None = None,
    ) -> None:
        """buffers: where the indices of each view go, for graphs."""
        if role is Role.RAGGED:
            wrapper.plan(
                step.qo_indptr,
                step.encoder_indptr() if group.view.cross else step.qo_indptr,
                *_heads(group),
                head_dim_vo=group.v_head_dim,
                causal=group.is_causal,
                kv_data_type=self.settings.dtype,
                **self._constants(group),
            )
            return
        keys = step.keys(keys_view(role, group), buffers)
        lens = [keys.indptr, keys.indices, keys.last_page_len]
        if has_decode_kernel(role, group):
            wrapper.plan(
                *lens,
                *_heads(group),
                self.settings.page_size,
                kv_data_type=self.settings.kv_dtype,
                disable_split_kv=self.settings.deterministic,
                **self._constants(group),
            )
            return
        # In cross attention each token sees all of the encoder.
        items = step.items() if role is Role.ITEMS and not group.view.cross else {}
        lens.insert(0, step.qo_indptr)
        masked = role is Role.MASKED
        if masked:
            # The library packs a mask on the device, by offsets that it computes from the lengths
            # where they are; it synchronises to get them back.
            lens = [values.to(keys.indices.device, non_blocking=True) for values in lens]
        wrapper.plan(
            *lens,
            *_heads(group),
            self.settings.page_size,
            head_dim_vo=group.v_head_dim,
            custom_mask=step.custom_mask if masked else None,
            causal=group.is_causal and role not in (Role.DECODE, Role.PREFIX, Role.MASKED),
            disable_split_kv=role is Role.DECODE and self.settings.deterministic,
            kv_data_type=self.settings.kv_dtype,
            **items,
            **self._constants(group),
        )

    def replan_decode(
        self,
        wrapper: Any,  # noqa: ANN401  # the library's class
        group: PlanGroup,
        indptr: torch.Tensor,
        keys: Keys,
    ) -> None:
        """Run the planner alone on a captured decode wrapper, whose buffers are filled.

        indptr: [B + 1] int32, its buffer. last_page_len stays on the host: the library reads it
        there and nowhere else.
        """
        self.kernels.fast_decode_plan(
            wrapper,
            indptr,
            keys.indices,
            keys.last_page_len,
            *_heads(group),
            self.settings.page_size,
            kv_data_type=self.settings.kv_dtype,
            global_override_indptr_cpu=keys.indptr,
            **self._constants(group),
        )

    def _constants(self, group: PlanGroup) -> dict[str, Any]:
        """Arguments of `plan` that every wrapper takes."""
        return {
            "window_left": group.window,
            "logits_soft_cap": group.logit_cap,
            "sm_scale": group.scaling,
            "q_data_type": self.settings.dtype,
        }

    def _prefill_backend(self, role: Role, group: PlanGroup) -> str:
        """fa3 knows no custom mask, does not split keys and, where a window begins, looks at no
        items (`mma_f16` in mainloop_mma.cuh). The library keeps its first choice for "auto", so a
        wrapper must not be planned with a mask in one step and without in another."""
        if group.has_sinks:
            return SINKS_BACKEND
        if role in (Role.DRAFT, Role.MASKED, Role.ITEMS):
            return "fa2"
        return self.settings.prefill_backend

    def _jit_arguments(self, group: PlanGroup) -> dict[str, Any]:
        """Arguments that compile a paged wrapper with sinks.

        `BatchAttentionWithAttentionSinkWrapper` does the same, but its name for the compiled module
        has neither head dims nor the dtype of K and V: two models would compile over each other.
        """
        if not group.has_sinks:
            return {}
        kernels, dtype, windowed = self.kernels, self.settings.dtype, group.window >= 0
        dims = group.head_dim, group.v_head_dim
        built_for = dtype, self.settings.kv_dtype, dtype, torch.int32, *dims
        name = kernels.get_batch_prefill_attention_sink_uri(
            SINKS_BACKEND, *built_for, NO_POSITIONS, windowed
        )
        source = kernels.attention_sink_decl[SINKS_BACKEND]
        softmax = ["sink"], ["float"], ["sm_scale"], ["double"], "AttentionSink", source
        return {
            "jit_args": [name, *built_for, *softmax],
            "jit_kwargs": {"use_sliding_window": windowed},
        }


def _heads(group: PlanGroup) -> tuple[int, int, int]:
    return group.num_q_heads, group.num_kv_heads, group.head_dim
