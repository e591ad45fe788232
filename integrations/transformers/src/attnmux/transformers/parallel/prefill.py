"""Ranks that run long prompts together, each with the whole model (prefill context parallel)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    Decision,
    InvalidInput,
    Measurement,
    Offer,
    Platform,
    Policy,
    Request,
    build,
    make_backend,
    solve_measured,
)
from attnmux.distributed import (
    PrefillParallelBackend,
    RankGroup,
    can_be_split,
    split_context,
    zigzag_step,
)
from attnmux.parts import PartAttention, parts_request
from attnmux.transformers.parallel.agreement import Companions
from attnmux.transformers.parallel.ranks import (
    GroupBuilds,
    GroupRanks,
    GroupSteps,
    check_whole_keys,
)
from attnmux.transformers.requests.sequence import Step

TOKENS_EACH = 256
"""New tokens of a rank from which splitting a prompt pays. With fewer of them, reading the weights
takes longer than multiplying by them, and every rank reads all weights: an H100 does 295 operations
of bfloat16 in the time of a byte (989 TFLOP/s and 3.35 TB/s, NVIDIA's datasheet), and a weight of 2
bytes has 2 operations for each token."""


class PrefillParallelRanks(GroupRanks):
    """Each rank has the whole model and the K and V of all tokens.

    Steps with a long prompt are split over the ranks in zigzag. All other steps, decode among them,
    run whole on each rank. All continue with the logits of rank 0.
    """

    def __init__(self, group: RankGroup, *, least_tokens: int | None = None) -> None:
        """least_tokens: new tokens of a prompt from which its steps are split; None: `TOKENS_EACH`
        for each rank. Raises InvalidInput for fewer than each rank has two chunks for."""
        least = TOKENS_EACH * group.size if least_tokens is None else least_tokens
        InvalidInput.check_at_least(1, "least_tokens", least)
        if least < 2 * group.size:
            expected = f"at least {2 * group.size}, a token for each of 2 chunks on each rank"
            raise InvalidInput("pcp_min_tokens", got=least, expected=expected)
        super().__init__(group, building=PartBuilds(group, least), steps=ZigzagSteps(group, least))


class PartBuilds(GroupBuilds):
    """Backends for whole steps, and for the parts of split ones."""

    run_images = False
    run_indexers = False

    def __init__(self, group: RankGroup, least_tokens: int) -> None:
        super().__init__(group)
        self.least_tokens = least_tokens
        self._parts = Companions(group)
        """Decisions for the parts of split steps, by the decision for whole ones."""

    def solve(
        self,
        request: Request,
        platform: Platform,
        offers: Sequence[Offer],
        policy: Policy,
        measurements: Sequence[Measurement],
    ) -> Decision:
        unfit = {
            "linear layers": request.linear_layers,
            "layers of several shapes or KV dtypes": request.other_layers,
            "a deterministic request": request.deterministic,
        }
        got = next((what for what, is_asked in unfit.items() if is_asked), "")
        if got:
            expected = (
                "attention in every layer, of one shape and KV dtype, and sums that may depend on "
                "a step's size"
            )
            raise InvalidInput("pcp", got=got, expected=f"{expected}: prompts are split over ranks")
        check_whole_keys(request, "pcp")
        whole = solve_measured(request, platform, offers, policy, measurements=measurements)
        of_parts = parts_request(request).replace(origin="default", page_size=whole.page_size)
        parts = solve_measured(of_parts, platform, offers, policy, measurements=measurements)
        self._parts.add(whole, parts)
        return whole

    def decided(
        self, decide: Callable[[], Decision], platform: Platform, offers: Sequence[Offer]
    ) -> Decision:
        return self._parts.decided(decide, platform, offers)

    def build(self, decision: Decision, context: BackendContext) -> AttentionBackend:
        of_parts = split_context(context)
        if not all(layer.is_mergeable for layer in context.layers):
            # Their layers run the rank's two pieces of each request as requests of their own
            context = replace(context, max_batch_size=2 * context.max_batch_size)
        choice = self._parts.of(decision).phases["extend"]
        return PrefillParallelBackend(
            inner=build(decision, context),
            parts=[make_backend(choice, of_parts) for _ in range(2 * PartAttention.MOST_LANES)],
            group=self.group,
        )

    def summary(self, decision: Decision) -> str:
        parts = self._parts.of(decision).summary()
        return (
            f"{decision.summary()}\nprompts of {self.least_tokens} tokens or more are split over "
            f"{self.group.size} ranks: {parts}"
        )


class ZigzagSteps(GroupSteps):
    """Steps with a long prompt; each rank runs a part."""

    def __init__(self, group: RankGroup, least_tokens: int) -> None:
        super().__init__(group)
        self.least_tokens = least_tokens

    def begin(self, step: Step, indices: torch.Tensor) -> tuple[Step, torch.Tensor]:
        if not self._is_split(step, indices):
            return step, indices
        part = self._part(step)
        return part, part.last_indices

    def end(self, logits: torch.Tensor, num_rows: int) -> torch.Tensor:
        # Ranks may round otherwise, and would go on with other tokens
        shape = num_rows, logits.shape[-1]
        logits = logits.contiguous() if len(logits) == num_rows else logits.new_empty(shape)
        self.group.broadcast(logits.view(torch.uint8))
        return logits

    def _is_split(self, step: Step, indices: torch.Tensor) -> bool:
        batch, asks_last = step.batch, indices is step.last_indices
        if not asks_last or not can_be_split(batch) or batch.extend_seq_lens_cpu is None:
            return False
        return int(batch.extend_seq_lens_cpu.max()) >= self.least_tokens

    def _part(self, step: Step) -> Step:
        """The tokens of this rank. Rank 0 has the last ones."""
        batch = zigzag_step(step.batch, rank=self.group.rank, size=self.group.size)
        ids = step.input_ids[batch.rows]
        return Step(batch=batch, input_ids=ids, last_indices=batch.last_tokens)
