"""A backend whose metadata are page tables: what both of FlashAttention 3's do with a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attnmux.core.backend import AttentionBackend
from attnmux.core.batch import ForwardBatch, ForwardMode
from attnmux.core.context import BackendContext
from attnmux.nvidia.fa3.drafts import DraftTables
from attnmux.nvidia.fa3.schedules import Schedules
from attnmux.nvidia.page_tables import KeyGroup, Keys, Step, fixed_buffers
from attnmux.nvidia.steps import check_room


class SteppingBackend(AttentionBackend):
    """Prepares steps, eager and in graphs; how a layer attends is its subclasses'."""

    def __init__(
        self,
        context: BackendContext,
        options: Mapping[str, object],
        groups: Iterable[KeyGroup],
        *,
        schedules: Schedules,
    ) -> None:
        """groups: of each layer that the pool stores."""
        super().__init__(context, options)
        self._groups = tuple(dict.fromkeys(groups))
        self._drafts = DraftTables(self._groups, context)
        self._schedules = schedules
        self._fixed: dict[KeyGroup, Keys] = {}
        self._fixed_batch_size = 0
        self._outgrown: list[dict[KeyGroup, Keys]] = []
        self._step: Step | None = None

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Decide the step's shape on the host; nothing is launched.

        Raises InvalidInput in debug mode for a mask that is not a draft tree's.
        """
        self._step = None
        if batch.forward_mode is not ForwardMode.IDLE:
            if in_capture:
                check_room(batch, self._fixed_batch_size)
            fixed = self._fixed if in_capture else {}
            self._step = Step.of(batch, self.context, fixed, trees=True)
            if self._step.is_tree:
                self._drafts.begin(batch, in_capture=in_capture)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Build page tables and lengths on the device, those of a tree's drafts too: at replay from
        what the batch then holds."""
        if self._step is not None:
            self._step.fill(batch, self._groups, self.context)
            if self._step.is_tree:
                self._drafts.fill(batch)
            self._schedules.fill(self._step)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Called again, for graphs of another mode, it keeps what captured graphs point at."""
        if max_bs > self._fixed_batch_size:
            self._outgrown.append(self._fixed)
            self._fixed = fixed_buffers(self._groups, max_bs, self.context)
            self._fixed_batch_size = max_bs
        self._drafts.reserve(max_bs, max_num_tokens)
        self._schedules.reserve(max_bs)
