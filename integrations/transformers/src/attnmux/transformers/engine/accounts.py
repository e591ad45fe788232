"""The engine's accounts: which requests there are, which step runs, and whose memory is due."""

from __future__ import annotations

from attnmux.transformers.engine.execution import Execution, Launched
from attnmux.transformers.engine.outputs import OutputQueue
from attnmux.transformers.engine.prefix import PrefixCache
from attnmux.transformers.engine.request import LiveRequest, Plan
from attnmux.transformers.engine.scheduler import Scheduler
from attnmux.transformers.engine.speculation import Speculation
from attnmux.transformers.run.stats import EngineStats, Laps


class Accounts:
    """Records that must agree between two steps, whatever an exception interrupts."""

    def __init__(
        self,
        *,
        cache: PrefixCache,
        scheduler: Scheduler,
        execution: Execution,
        speculation: Speculation | None,
        stats: EngineStats,
    ) -> None:
        self._cache, self._scheduler = cache, scheduler
        self._execution, self._speculation, self._stats = execution, speculation, stats
        self.live: dict[int, LiveRequest] = {}
        """In order of arrival. Those that have ended stay until their memory is free."""
        self.running: Plan | None = None
        """The step that a call runs at this moment."""
        self.ahead: Launched | None = None
        """The next step, if the device has it already."""
        self.intact = True
        """Whether the scheduler, the cache and the requests agree. False while they change."""
        self.has_ended = False
        """Whether a request in `live` has ended."""
        self.outputs = OutputQueue()

    def reset(self) -> None:
        """Forget every request and output, and free all memory."""
        self.running = None
        self.intact = False
        self.live.clear()
        self.outputs = OutputQueue()
        self.settle()

    def abort(self, request: LiveRequest) -> None:
        """End a request without a result; `settle` frees its memory."""
        self._stats.aborted += 1
        self.has_ended = True
        request.finish_reason = "abort"
        self.outputs.forget(request)

    def drop(self, plan: Plan) -> None:
        """Abort the requests of a failed step, whose K and V may be incomplete. Each has a result,
        which the next call of `step` returns."""
        self.intact = False
        self._forget_steps()
        for request in plan.requests:
            request.is_sound = False
            if request.finish_reason != "abort" and not self.outputs.ends(request):
                self.abort(request)
                self.outputs.add_aborted(request)

    def settle(self) -> None:
        """Free the memory of ended requests, or all memory after an interrupted change.

        Does nothing while a step runs. The memory of requests in a step that was launched ahead is
        freed after that step.
        """
        if self.running is not None:
            return
        steps, scheduler = self._cache.steps, self._scheduler
        if not (self.intact and steps.intact and scheduler.num_requests == len(self.live)):
            self._restart()
        elif self.has_ended and self.ahead is None:
            self.intact = False
            self._cache.release([request for request in self.live.values() if request.ended])
            scheduler.drop_ended()
            self._forget_ended()
            self.intact = True

    def _restart(self) -> None:
        """Free everything in any state. The requests wait and run again."""
        self.intact = False
        self._cache.steps.reset()
        self._forget_steps()
        self._forget_ended()
        for request in self.live.values():
            request.state.forget()
            request.node = None
        self._scheduler.restart(self.live.values())
        self.intact = True

    def _forget_steps(self) -> None:
        self.ahead = None
        self._execution.forget()
        if self._speculation is not None:
            self._speculation.forget()

    def _forget_ended(self) -> None:
        self.live = {request.id: request for request in self.live.values() if not request.ended}
        if self._speculation is not None:
            self._speculation.keep_only(self.live.values())
        self.has_ended = False


class RunningStep:
    """The block of a step, in which the accounts are not `intact`. They are again after it, unless
    it raises while the requests take its tokens. Not a generator, as `Turn` is none."""

    def __init__(self, accounts: Accounts, plan: Plan, laps: Laps) -> None:
        self._accounts, self._plan, self._laps = accounts, plan, laps
        self.commits = False
        """Whether the requests take their tokens."""

    def __enter__(self) -> RunningStep:
        self._accounts.running, self._accounts.intact = self._plan, False
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        accounts = self._accounts
        try:
            if kind is not None:
                accounts.drop(self._plan)
            accounts.intact = kind is None or not self.commits
        finally:
            accounts.running = None
            accounts.settle()
            self._laps.lap("commit")
