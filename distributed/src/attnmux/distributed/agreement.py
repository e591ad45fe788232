"""The agreement of data parallel ranks before each step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attnmux.core import ForwardBatch, ForwardMode, GraphRunner
from attnmux.distributed.data_parallel import TokensOfRanks
from attnmux.distributed.errors import RanksDiffer
from attnmux.distributed.ranks import RankGroup

EAGER, ANY = -1, -2
"""In place of the number of a runner: no graph serves the batch; every graph does, by padding."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AgreedStep:
    """A step that every rank runs in the same way."""

    tokens: TokensOfRanks
    """For the layers of an eager step. A graph has the `TokensOfRanks.even` of its capture."""
    runner: GraphRunner | None = None
    """This rank's runner of the graph that every rank replays; None: every rank runs eagerly."""
    size: int | None = None
    """The captured size that every rank replays."""


def agree_on_step(
    group: RankGroup,
    batch: ForwardBatch,
    runners: Sequence[GraphRunner] = (),
) -> AgreedStep:
    """Exchange the ranks' batches, once, before a step.

    Modes may differ between ranks; a rank without requests passes an IDLE batch (`idle_batch`).
    All ranks replay a graph if one of the `runners` serves every rank's batch at the size of the
    largest; otherwise all run eagerly, `tokens` in the cheapest padding mode. Without tokens on any
    rank there is nothing to run.

    runners: in the same order on each rank, with graphs of the same sizes, as
    `capture_on_all_ranks` makes them.
    Raises RanksDiffer, on every rank, for other sizes, and RankFailed for a rank that does not take
    part.
    """
    description = _said(runners)
    number, size = _served(batch, runners)
    mine = (batch.num_tokens, number, size, zlib.crc32(description.encode()))
    of_ranks = group.exchange_numbers(mine)
    if len({digest for *_, digest in of_ranks}) > 1:
        by_rank = group.exchange(description)
        hint = "pass runners of `capture_on_all_ranks`, or none, on each"
        raise RanksDiffer("the step", by_rank=by_rank, hint=hint)
    tokens = TokensOfRanks.of(group, [count for count, *_ in of_ranks])
    common = _common(runners, [(number, size) for _, number, size, _ in of_ranks])
    if common is None:
        return AgreedStep(tokens=tokens)
    runner, size = common
    return AgreedStep(tokens=tokens, runner=runner, size=size)


def idle_batch(device: torch.device) -> ForwardBatch:
    """The batch of a rank without requests."""
    none = torch.zeros(0, dtype=torch.int64, device=device)
    lens_cpu = torch.zeros(0, dtype=torch.int32)
    return ForwardBatch(
        forward_mode=ForwardMode.IDLE,
        batch_size=0,
        req_pool_indices=none,
        seq_lens=none.int(),
        out_cache_loc=none,
        positions=none,
        seq_lens_cpu=lens_cpu,
        seq_lens_sum=0,
    )


def _served(batch: ForwardBatch, runners: Sequence[GraphRunner]) -> tuple[int, int]:
    """The number of the first runner that serves the batch, and the smallest size that holds it."""
    if batch.forward_mode is ForwardMode.IDLE and not batch.num_tokens:
        return ANY, 0
    for number, runner in enumerate(runners):
        size = runner.size_for(batch)
        if size is not None:
            return number, size
    return EAGER, 0


def _common(
    runners: Sequence[GraphRunner], served: Sequence[tuple[int, int]]
) -> tuple[GraphRunner, int] | None:
    """The runner and the size that serve every rank, if there are such."""
    numbers = {number for number, _ in served} - {ANY}
    if len(numbers) != 1 or EAGER in numbers:
        return None
    return runners[numbers.pop()], max(size for _, size in served)


def _said(runners: Sequence[GraphRunner]) -> str:
    graphs = [
        f"{runner.config.forward_mode.name} of {runner.config.tokens_per_request} tokens in sizes "
        f"{runner.batch_sizes}"
        for runner in runners
    ]
    return ", ".join(graphs or ["no graphs"])
