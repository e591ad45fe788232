"""Going on to the next candidate when a chosen backend cannot be made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from attnmux.core.choosing.common.frozen import FrozenMapping
from attnmux.core.choosing.tell.decision import Decision
from attnmux.core.errors import BackendFailed

T = TypeVar("T")


def make_first(
    decide: Callable[[Mapping[str, BackendFailed]], Decision],
    make: Callable[[Decision], T],
    on_fallback: Callable[[BackendFailed, Decision], None],
) -> T:
    """Decide and make, again without the backends that failed, until one is made.

    decide: given `Policy.failed`, solves. make: builds the decision's backend, `build` in it; what
    it allocated before a failure is its own to drop. on_fallback: told of each failure and of the
    decision that replaces it, so that nobody falls back in silence.
    A backend that the asker named is not replaced: `decide` then raises NoBackend, whose reasons
    carry the failure and the line that may mend it.
    """
    failed: dict[str, BackendFailed] = {}
    decision = decide(FrozenMapping(failed))
    while True:
        try:
            return make(decision)
        except BackendFailed as failure:
            if failure.address in failed:
                raise
            # A copy without the traceback, whose frames hold what `make` had allocated.
            copy = BackendFailed(failure.address, failure.reason, hint=failure.hint)
            failed[failure.address] = copy
            decision = _instead(decide, failed, failure)
            on_fallback(copy, decision)


def _instead(
    decide: Callable[[Mapping[str, BackendFailed]], Decision],
    failed: Mapping[str, BackendFailed],
    failure: BackendFailed,
) -> Decision:
    try:
        return decide(FrozenMapping(failed))
    except Exception as refusal:
        raise refusal from failure
