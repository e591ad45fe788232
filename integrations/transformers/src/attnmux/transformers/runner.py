"""A model on its backend: pools, steps and logits."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from attnmux.core.backend import AttentionBackend, BackendContext
from attnmux.core.choosing.decision import Decision
from attnmux.core.compose.building import build
from attnmux.core.kv import PagedAllocator, ReqToTokenPool
from attnmux.core.layer import LayerSpec
from attnmux.core.op import forward_context
from attnmux.core.workspace import Workspace
from attnmux.transformers.batching import StepBuilder
from attnmux.transformers.pools import make_pool
from attnmux.transformers.rotary import fixed_row_len
from attnmux.transformers.sequence import SequenceState, Step


class ModelRunner:
    """Runs steps of a model whose attention is the decided backend's.

    It holds no requests: a caller keeps `SequenceState`s, extends them, decodes them, and
    releases them. One step is in flight at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[LayerSpec],
        decision: Decision,
        *,
        max_batch_size: int,
        max_context_len: int,
        max_total_tokens: int,
        debug: bool = False,
    ) -> None:
        """Allocate the pools and build the backend.

        model: loaded with attn_implementation="attnmux", on the decision's device.
        layers: from `record_layers`. max_total_tokens: tokens of all requests together; there is
        room for them even where each request leaves its last page part-filled.
        Raises PoolExhausted when the memory does not suffice for the pools.
        """
        self.model = model
        self.decision = decision
        device = model.device
        page_size = decision.page_size
        part_filled = max_batch_size if page_size > 1 else 0
        size = (max_total_tokens // page_size + part_filled) * page_size
        pool = make_pool(layers, decision, size=size, device=device)
        table = ReqToTokenPool(max_batch_size, max_context_len, device)
        self.context = BackendContext(
            request=decision.request,
            platform=decision.platform,
            device=device,
            layers=tuple(layers),
            req_to_token_pool=table,
            token_to_kv_pool=pool,
            workspace=Workspace(device),
            max_batch_size=max_batch_size,
            max_context_len=max_context_len,
            debug=debug,
        )
        self.backend: AttentionBackend = build(decision, self.context)
        self.steps = StepBuilder(
            table,
            PagedAllocator(size, page_size, device),
            max_step_tokens=fixed_row_len(model.config),
        )
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def extend(
        self, states: Sequence[SequenceState], num_new: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run the next pending tokens of each request; see `StepBuilder.extend`.

        Returns the logits after each request's last new token, [B, vocabulary]. Where the model
        itself fails, the requests hold slots without K and V: release them.
        """
        step = self.steps.extend(states, num_new)
        return self.forward(step, step.last_indices)

    def decode(self, states: Sequence[SequenceState]) -> torch.Tensor:
        """Run the one pending token of each request. Returns its logits, [B, vocabulary]."""
        step = self.steps.decode(states)
        return self.forward(step, step.last_indices)

    def release(self, states: Sequence[SequenceState]) -> None:
        """Free everything that the requests hold."""
        self.steps.release(states)

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    @torch.inference_mode()
    def forward(self, step: Step, indices: torch.Tensor) -> torch.Tensor:
        """Run a step. Returns the logits after the tokens at `indices`, [len(indices), vocabulary].

        indices: [n] int64 among the step's T tokens.
        """
        keep = {"logits_to_keep": indices} if self._keeps_logits else {}
        self.backend.init_forward_metadata(step.batch)
        with forward_context(self.backend, step.batch):
            logits = self.model(
                input_ids=step.input_ids.unsqueeze(0),
                position_ids=step.batch.positions.unsqueeze(0),
                use_cache=False,
                **keep,
            ).logits[0]
        if not self._keeps_logits:
            logits = logits[indices]
        assert isinstance(logits, torch.Tensor)
        return logits
