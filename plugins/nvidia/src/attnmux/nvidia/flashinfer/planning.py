"""The library's wrappers, and how each is planned for a step."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch

from attnmux.core.batch import ForwardBatch
from attnmux.core.errors import InvalidInput
from attnmux.nvidia.flashinfer.groups import PlanGroup, View
from attnmux.nvidia.flashinfer.kernels import Kernels
from attnmux.nvidia.flashinfer.settings import Settings
from attnmux.nvidia.flashinfer.sinks import BACKEND as OF_SINKS
from attnmux.nvidia.flashinfer.sinks import jit_arguments
from attnmux.nvidia.flashinfer.step import Keys, Step

LAYOUT = "NHD"
"""[pages, page_size, heads, dim]: how pools lie."""


class Role(Enum):
    """What a wrapper is planned for. Those of one step keep their plans side by side."""

    DECODE = auto()
    """One new token a request, keys in the pool."""
    PAGED = auto()
    """Many new tokens, all keys in the pool."""
    DRAFT = auto()
    """The same for a few draft tokens behind long prefixes: fa2, which splits the keys."""
    MASKED = auto()
    """The same with a custom mask."""
    ITEMS = auto()
    """The same where tokens see a prefix and their own item alone."""
    PREFIX = auto()
    """Many new tokens against the keys before them, in the pool."""
    RAGGED = auto()
    """Many new tokens against K and V of the call, in cross attention those of the encoder."""


def pool_role(batch: ForwardBatch) -> Role:
    """How a step reads all of its keys from the pool."""
    mode, spec = batch.forward_mode, batch.spec_info
    if mode.is_decode():
        return Role.DECODE
    if spec is not None and spec.custom_mask is not None:
        return Role.MASKED
    if batch.multi_item is not None:
        return Role.ITEMS
    if mode.is_target_verify() or mode.is_draft_extend():
        return Role.DRAFT
    return Role.PAGED


WITHOUT_SINKS = {
    Role.RAGGED: "attention to K and V of the call alone",
    Role.MASKED: "a step with a custom mask",
    Role.ITEMS: "a step of many items",
}
"""Roles whose kernels look at no sinks."""


def check_served(role: Role, group: PlanGroup, batch: ForwardBatch) -> None:
    """Raises InvalidInput for what the kernels of a role do not look at."""
    if group.has_sinks and role in WITHOUT_SINKS:
        raise InvalidInput(
            "layer.sinks",
            came=f"sinks in {WITHOUT_SINKS[role]}",
            expected="None: flashinfer's softmax with sinks reads the pool, without such a mask",
        )
    if role is Role.RAGGED and batch.multi_item is not None and not group.view.cross:
        raise InvalidInput(
            "multi_item",
            came="many items over K and V of the call alone",
            expected="None, or K and V in the pool: save_kv_cache=True",
        )


def has_decode_kernel(role: Role, group: PlanGroup) -> bool:
    """Whether the library's decode wrapper serves; sinks are the prefill wrapper's alone."""
    return role is Role.DECODE and not group.has_sinks


def constants(group: PlanGroup, settings: Settings, window: int) -> dict[str, Any]:
    """Arguments of `plan` that every wrapper takes."""
    return {
        "window_left": window,
        "logits_soft_cap": group.logit_cap,
        "sm_scale": group.scaling,
        "q_data_type": settings.dtype,
    }


def plan_decode(wrapper: Any, group: PlanGroup, settings: Settings, keys: Keys) -> None:  # noqa: ANN401  # the library's class
    """Plan a decode wrapper; one over fixed buffers is given their contents too."""
    wrapper.plan(
        keys.indptr,
        keys.indices,
        keys.last_page_len,
        group.num_q_heads,
        group.num_kv_heads,
        group.head_dim,
        settings.page_size,
        kv_data_type=settings.kv_dtype,
        disable_split_kv=settings.deterministic,
        **constants(group, settings, group.window),
    )


def plan_paged(
    wrapper: Any,  # noqa: ANN401  # the library's class
    role: Role,
    group: PlanGroup,
    settings: Settings,
    step: Step,
    keys: Keys,
) -> None:
    """Plan a prefill wrapper over the pool.

    A custom mask is packed on the device by offsets on the device, which the library computes from
    the lengths where they lie; so these go there too, and it synchronises to get them back.
    """
    lens = [step.qo_indptr, keys.indptr, keys.indices, keys.last_page_len]
    masked = role is Role.MASKED
    if masked:
        lens = [values.to(keys.indices.device, non_blocking=True) for values in lens]
    wrapper.plan(
        *lens,
        group.num_q_heads,
        group.num_kv_heads,
        group.head_dim,
        settings.page_size,
        head_dim_vo=group.v_head_dim,
        custom_mask=step.custom_mask if masked else None,
        causal=group.is_causal and role not in (Role.DECODE, Role.PREFIX, Role.MASKED),
        disable_split_kv=role is Role.DECODE and settings.deterministic,
        kv_data_type=settings.kv_dtype,
        **_items(role, group, step),
        **constants(group, settings, group.window),
    )


def _items(role: Role, group: PlanGroup, step: Step) -> dict[str, Any]:
    """Arguments of `plan` for many items. In cross attention each token sees all of the encoder."""
    items = step.items() if role is Role.ITEMS and not group.view.cross else None
    if items is None:
        return {}
    return {
        "prefix_len_ptr": items.prefix_lens,
        "token_pos_in_items_ptr": items.places.view(-1),
        "token_pos_in_items_len": items.places.shape[1],
        "max_item_len_ptr": items.longest,
    }


class EagerPlans:
    """One wrapper for each role and group, made when first planned."""

    def __init__(self, kernels: Kernels, settings: Settings, workspace: torch.Tensor) -> None:
        self._kernels = kernels
        self._settings = settings
        self._workspace = workspace
        self._wrappers: dict[tuple[Role, PlanGroup], Any] = {}

    def plan(self, role: Role, group: PlanGroup, step: Step) -> Any:  # noqa: ANN401  # the library's class
        """The wrapper of a role and group, planned for the step."""
        check_served(role, group, step.batch)
        wrapper = self._wrappers.get((role, group))
        if wrapper is None:
            wrapper = self._wrappers[role, group] = self._make(role, group)
        if has_decode_kernel(role, group):
            plan_decode(wrapper, group, self._settings, step.keys(group.view))
        elif role is Role.RAGGED:
            self._plan_ragged(wrapper, group, step)
        else:
            keys = step.keys(keys_view(role, group))
            plan_paged(wrapper, role, group, self._settings, step, keys)
        return wrapper

    def _make(self, role: Role, group: PlanGroup) -> Any:  # noqa: ANN401  # the library's class
        if has_decode_kernel(role, group):
            return self._kernels.decode(
                self._workspace,
                LAYOUT,
                use_tensor_cores=self._settings.tensor_cores,
                backend=self._settings.decode_backend,
            )
        make = self._kernels.ragged if role is Role.RAGGED else self._kernels.paged
        return make(
            self._workspace,
            LAYOUT,
            backend=prefill_backend(role, group, self._settings),
            **jit_arguments(self._kernels, group, self._settings),
        )

    def _plan_ragged(
        self,
        wrapper: Any,  # noqa: ANN401  # the library's class
        group: PlanGroup,
        step: Step,
    ) -> None:
        wrapper.plan(
            step.qo_indptr,
            step.encoder_indptr() if group.view.cross else step.qo_indptr,
            group.num_q_heads,
            group.num_kv_heads,
            group.head_dim,
            head_dim_vo=group.v_head_dim,
            causal=group.is_causal,
            kv_data_type=self._settings.dtype,
            **constants(group, self._settings, group.window),
        )


def keys_view(role: Role, group: PlanGroup) -> View:
    """The keys that a plan over the pool reads."""
    if role in (Role.MASKED, Role.ITEMS):
        return group.all_keys
    return group.prefix if role is Role.PREFIX else group.view


def prefill_backend(role: Role, group: PlanGroup, settings: Settings) -> str:
    """fa3 knows no custom mask, does not split keys and, where a window begins, looks at no items
    (`mma_f16` in mainloop_mma.cuh). The library keeps what "auto" came to, so a wrapper must
    not be planned with a mask in one step and without in another."""
    if group.has_sinks:
        return OF_SINKS
    if role in (Role.DRAFT, Role.MASKED, Role.ITEMS):
        return "fa2"
    return settings.prefill_backend
