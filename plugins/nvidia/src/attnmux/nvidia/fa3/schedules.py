"""The library's schedule of a step, computed once and not in every layer.

A call of a step whose requests have as many queries each launches two kernels: one that lays out
the work by the lengths, and attention. The first one's result depends on nothing that layers of a
kind do not share. Handed over, it saves that launch where the library splits keys; where it does
not, it resets a counter in a launch of its own instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from attnmux.core.context import BackendContext
from attnmux.core.layer import LayerSpec
from attnmux.nvidia.page_tables import KeyGroup, Step


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Layers that share a schedule: what it depends on beside a step."""

    group: KeyGroup
    num_heads: int
    num_heads_k: int
    headdim: int
    headdim_v: int
    qkv_dtype: torch.dtype
    causal: bool
    window_size: tuple[int, int]
    attention_chunk: int
    has_softcap: bool
    num_splits: int

    @classmethod
    def of(
        cls,
        layer: LayerSpec,
        group: KeyGroup,
        arguments: dict[str, Any],
        *,
        headdim: int,
        qkv_dtype: torch.dtype,
    ) -> Kind:
        """arguments: the call's, by the library's names. headdim: of K as the call has it."""
        return cls(
            group=group,
            num_heads=layer.tp_q_head_num,
            num_heads_k=layer.tp_k_head_num,
            headdim=headdim,
            headdim_v=layer.v_head_dim,
            qkv_dtype=qkv_dtype,
            causal=arguments["causal"],
            window_size=arguments["window_size"],
            attention_chunk=arguments["attention_chunk"],
            has_softcap=arguments["softcap"] > 0,
            num_splits=arguments["num_splits"],
        )


class Schedules:
    """Of the steps of one backend, for every kind of its layers."""

    def __init__(
        self,
        kinds: Iterable[Kind | None],
        get_scheduler_metadata: Callable[..., torch.Tensor],
        context: BackendContext,
    ) -> None:
        """kinds: of each layer, None of one that the pool does not store. Where keys are never
        split there is nothing to save, and no schedule."""
        found = (kind for kind in kinds if kind is not None and kind.num_splits != 1)
        self._kinds = tuple(dict.fromkeys(found))
        self._get = get_scheduler_metadata
        self._device = context.device
        self._fixed: dict[Kind, torch.Tensor] = {}
        self._outgrown: list[dict[Kind, torch.Tensor]] = []
        self._room = 0
        self._of_step: dict[Kind, torch.Tensor] = {}

    def reserve(self, max_batch_size: int) -> None:
        """Make buffers for graphs of up to that many requests."""
        if max_batch_size > self._room:
            self._outgrown.append(self._fixed)
            # Four vectors of whole fours, and the counter, are the most that a schedule has.
            size = 4 * (-(-max_batch_size // 4) * 4) + 1
            self._fixed = {
                kind: torch.zeros(size, dtype=torch.int32, device=self._device)
                for kind in self._kinds
            }
            self._room = max_batch_size

    def fill(self, step: Step) -> None:
        """Compute those of a prepared step: static shapes, nothing is read on the host.

        Packed queries have none: how the library splits them depends on their number, which it is
        not told here. Nor have no requests: a launch without blocks fails, and the library ends the
        process then.
        """
        self._of_step = {}
        if not step.batch_size or step.queries_each is None or step.is_tree:
            return
        for kind in self._kinds:
            made = self._made(kind, step)
            if step.fixed:
                made = self._fixed[kind][: made.shape[0]].copy_(made)
            self._of_step[kind] = made

    def of(self, kind: Kind | None) -> torch.Tensor | None:
        """The `scheduler_metadata` of a layer's call in this step; None where it has none."""
        return None if kind is None else self._of_step.get(kind)

    def _made(self, kind: Kind, step: Step) -> torch.Tensor:
        keys, page_size = step.keys[kind.group], kind.group.page_size
        return self._get(
            step.batch_size,
            step.queries_each,
            # What the attention takes for it too: all that the table has room for.
            keys.page_table.shape[1] * page_size,
            kind.num_heads,
            kind.num_heads_k,
            kind.headdim,
            keys.lens,
            qkv_dtype=kind.qkv_dtype,
            headdim_v=kind.headdim_v,
            page_size=page_size,
            causal=kind.causal,
            window_size=kind.window_size,
            attention_chunk=kind.attention_chunk,
            has_softcap=kind.has_softcap,
            num_splits=kind.num_splits,
        )
