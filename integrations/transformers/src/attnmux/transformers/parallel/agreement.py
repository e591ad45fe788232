"""Agreement of the ranks of one model: on the decision, and on every step."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from attnmux.core import (
    AttnmuxError,
    BackendFailed,
    Decision,
    InvalidInput,
    NoBackend,
    Offer,
    Platform,
)
from attnmux.distributed import RankFailed, RankGroup, RanksDiffer

T = TypeVar("T")


def decided(
    group: RankGroup,
    decide: Callable[[], Sequence[Decision]],
    platform: Platform,
    offers: Sequence[Offer],
) -> tuple[Decision, ...]:
    """Rank 0's decisions, which hold on every rank.

    Raises on every rank what `decide` raises on rank 0, and RanksDiffer if a decision does not
    hold on a rank, such as one with another kind of device.
    """
    told, failure = "", None
    if group.rank == 0:
        try:
            told = json.dumps([each.to_json() for each in decide()])
        except AttnmuxError as error:
            failure, told = error, json.dumps({"kind": type(error).__name__, "said": str(error)})
    read = json.loads(group.tell(told))
    if isinstance(read, dict):
        raise failure or _error_of(**read)
    decisions = tuple(Decision.from_json(text) for text in read)
    problems = []
    for decision in decisions:
        try:
            decision.check(platform, offers)
        except InvalidInput as error:
            problems.append(str(error.got))
    answers = group.exchange("; ".join(problems))
    if any(answers):
        name = decisions[0].hash[:12]
        by_rank = [difference or f"decision {name} holds" for difference in answers]
        raise RanksDiffer("the decision", by_rank=by_rank)
    return decisions


def _error_of(kind: str, said: str) -> AttnmuxError:
    """The error of rank 0, of its class if a message alone makes one."""
    return NoBackend(said) if kind == NoBackend.__name__ else AttnmuxError(said)


class Companions:
    """Decisions that belong to others. Rank 0 makes both."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._by_hash: dict[str, Decision] = {}

    def add(self, decision: Decision, other: Decision) -> None:
        self._by_hash[decision.hash] = other

    def of(self, decision: Decision) -> Decision:
        """The one that was added for a decision."""
        return self._by_hash[decision.hash]

    def decided(
        self, decide: Callable[[], Decision], platform: Platform, offers: Sequence[Offer]
    ) -> Decision:
        """The decision of rank 0, whose companion every rank gets too; see `decided`. `decide`
        adds it."""

        def both() -> tuple[Decision, ...]:
            decision = decide()
            return decision, self.of(decision)

        decision, other = decided(self._group, both, platform, offers)
        self.add(decision, other)
        return decision


def together(group: RankGroup, make: Callable[[], T]) -> T:
    """The result of `make`, if it succeeds on every rank.

    Raises BackendFailed on all ranks for a backend that failed on one, so that all of them go on to
    the same next candidate; any other error on its rank, and AttnmuxError with it on the others.
    """
    result, failure = None, None
    try:
        result = make()
    except RankFailed:
        raise
    except Exception as error:  # libraries and compilers raise anything
        failure = error
    backend = failure.address if isinstance(failure, BackendFailed) else ""
    reason = failure.reason if isinstance(failure, BackendFailed) else ""
    texts = group.exchange(
        json.dumps([backend, reason or (AttnmuxError.in_brief(failure) if failure else "")])
    )
    answers = {rank: json.loads(text) for rank, text in enumerate(texts)}
    failed = {rank: answer for rank, answer in answers.items() if answer[1]}
    if not failed:
        return cast("T", result)
    if failure is not None and not backend:
        raise failure
    rank, (address, why) = next(iter(failed.items()))
    if address:
        raise BackendFailed(address, f"on rank {rank}: {why}")
    raise AttnmuxError(f"rank {rank} could not start: {why}")


def check_step(group: RankGroup, kind: str, requests: Sequence[Sequence[int]]) -> None:
    """Check that all ranks run the same step on the same tokens.

    kind: of the step. requests: numbers of each request, such as its id and its tokens.
    Raises RanksDiffer on every rank if they differ, and RankFailed without an answer.
    """
    description = f"{kind} of {[list(each) for each in requests]}"
    digests = group.exchange_numbers([zlib.crc32(description.encode())])
    if len({digest for (digest,) in digests}) > 1:
        by_rank = group.exchange(description)
        raise RanksDiffer("the step", by_rank=by_rank, hint="give each rank the same requests")
