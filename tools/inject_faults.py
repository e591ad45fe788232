"""Raise exceptions at random lines of a serving engine, and check that nothing was lost by them.

    python tools/inject_faults.py --faults 10000 --seed 0

The model hashes the tokens in its KV cache, so that a lost or foreign slot changes the answer.
Prompts share beginnings and come in chunks; the pool is small, so that requests are retracted.
After each fault every page and every row has exactly one owner, and in the end every request that
was not aborted has the right answer. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import attnmux.core.kv as kv
import attnmux.transformers.engine as engine_package
from attnmux.core import ForwardBatch, MHATokenToKVPool, ReqToTokenPool, SWAKVPool
from attnmux.parts import DraftTree
from attnmux.transformers import Engine, StepBuilder
from attnmux.transformers.engine import scheduler
from attnmux.transformers.ranks import ONE_RANK
from attnmux.transformers.requests.prefixes import PrefixNode, WindowPrefixTree, WindowSpan
from attnmux.transformers.requests.sequence import SequenceState, Step
from attnmux.transformers.requests.slots import PagedAllocator, SWAAllocator

VOCABULARY = 50
PLACES = 10_000
Traced = Any  # what sys.settrace takes, which calls itself by that name
FAULTS: tuple[Callable[[], BaseException], ...] = (
    KeyboardInterrupt,
    lambda: torch.OutOfMemoryError("injected"),
    lambda: RuntimeError("injected"),
)
WATCHED = tuple(
    str(Path(str(package.__file__)).parent) for package in (kv, engine_package)
) + tuple(
    str(Path(str(engine_package.__file__)).parents[1] / f"{module}.py")
    for module in ("batching", "decode_batch", "sequence", "sampling", "verify_step")
)


class Injector:
    """Raises a fault at the n-th line that the watched modules run, and perhaps a second one."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.raised: list[str] = []
        self._lines_left = 0
        self._again = False

    def __call__(self, function: Callable[[], None], *, lines: int, twice: bool) -> None:
        """Call a function, with the fault within its first `lines` lines."""
        self.raised = []
        self._lines_left, self._again = self.rng.randrange(1, lines), twice
        sys.settrace(self._enter)
        try:
            function()
        finally:
            sys.settrace(None)
            sys.setprofile(None)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Traced:
        return self._line if frame.f_code.co_filename.startswith(WATCHED) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Traced:
        if event != "line":
            return self._line
        self._lines_left -= 1
        if self._lines_left > 0:
            return self._line
        self.raised.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        if self._again:
            # Python removes a trace function that raises: the profiler puts it back on the way out
            self._again, self._lines_left = False, self.rng.randrange(1, 30)
            sys.setprofile(self._resume)
        raise self.rng.choice(FAULTS)()

    def _resume(self, frame: FrameType, event: str, arg: object) -> None:
        sys.setprofile(None)
        sys.settrace(self._enter)
        above: FrameType | None = frame.f_back
        while above is not None:
            if above.f_code.co_filename.startswith(WATCHED):
                above.f_trace = self._line
            above = above.f_back


def next_token(ids: Sequence[int]) -> int:
    return zlib.crc32(bytes(ids)) % VOCABULARY


def continued(ids: Sequence[int], num: int) -> tuple[int, ...]:
    """The right answer."""
    whole = list(ids)
    for _ in range(num):
        whole.append(next_token(whole))
    return tuple(whole[len(ids) :])


WINDOW = 6
"""Earlier tokens that a token sees in the window layer, which half of the workloads have."""


def window_tree(size: int, page_size: int, *, debug: bool) -> WindowPrefixTree:
    """A prefix tree on pools of a full layer 0 and a window layer 1."""

    def pool(layer_id: int, size: int) -> MHATokenToKVPool:
        return MHATokenToKVPool(
            size=size,
            page_size=page_size,
            dtype=torch.float32,
            layer_ids=[layer_id],
            num_kv_heads=1,
            head_dim=1,
            device="cpu",
        )

    span = WindowSpan(sliding_window_size=WINDOW)
    window_size = min(4 * span.tokens_each(page_size), size)
    allocator = SWAAllocator(SWAKVPool(full=pool(0, size), swa=pool(1, window_size)), debug=debug)
    return WindowPrefixTree(allocator, span)


class HashingRunner:
    """A model whose KV cache holds each token with its place. With a window layer, the last tokens
    of a request are read there."""

    def __init__(self, *, page_size: int, debug: bool, has_window: bool) -> None:
        size = 80
        tree = window_tree(size, page_size, debug=debug) if has_window else None
        self.steps = StepBuilder(
            ReqToTokenPool(5, 64, "cpu"),
            tree.swa_allocator if tree else PagedAllocator(size, page_size, "cpu", debug=debug),
            window_tree=tree,
        )
        self.windows = torch.full((size + page_size,), -1)
        self.vocabulary_size = VOCABULARY
        self.ranks = ONE_RANK
        self.is_deterministic = False
        self.verify_graphs = self.tree_kernels = None
        self.cache = torch.full((size + page_size,), -1)

    def check_drafts(self, topk: int) -> None:
        """Steps verify any."""

    def idle(self) -> bool:
        return False

    def forward(self, step: Step, indices: torch.Tensor, laps: object = None) -> torch.Tensor:
        batch = step.batch
        self.cache[batch.out_cache_loc] = step.input_ids * PLACES + batch.positions
        if self.steps.window_tree is not None:
            loc = self._windowed(batch.out_cache_loc)
            self.windows[loc] = step.input_ids * PLACES + batch.positions
        table = self.steps.req_to_token_pool.req_to_token
        logits = torch.zeros(batch.batch_size, VOCABULARY)
        lens = batch.seq_lens.tolist()
        if batch.spec_info is not None:
            return self._after_drafts(batch)
        for place, (row, length) in enumerate(zip(batch.req_pool_indices, lens, strict=True)):
            held = self._held(table[row, :length].long())
            # What another request wrote makes another token, not an error
            logits[place, next_token([one // PLACES % VOCABULARY for one in held])] = 1.0
        return logits[torch.searchsorted(step.last_indices, indices)]

    def _after_drafts(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, vocabulary]: the logits after each token of the chains."""
        num, table = batch.num_tokens // batch.batch_size, self.steps.req_to_token_pool
        logits = torch.zeros(batch.num_tokens, VOCABULARY)
        for place, row in enumerate(logits):
            request = place // num
            end = int(batch.seq_lens[request]) + place % num + 1
            slots = table.req_to_token[batch.req_pool_indices[request], :end].long()
            held = self._held(slots)
            row[next_token([one // PLACES % VOCABULARY for one in held])] = 1.0
        return logits

    def _windowed(self, slots: torch.Tensor) -> torch.Tensor:
        assert self.steps.window_tree is not None
        return self.steps.window_tree.swa_allocator.pool.translate(slots, 1)

    def _held(self, slots: torch.Tensor) -> list[int]:
        """The tokens in the cache, the last ones as the window layer has them."""
        held = self.cache[slots]
        if self.steps.window_tree is not None:
            held[-WINDOW - 1 :] = self.windows[self._windowed(slots[-WINDOW - 1 :])]
        found: list[int] = held.tolist()
        return found


class Guesses:
    """Chains that are right up to a random node."""

    draft_token_num, topk = 6, 1

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def propose(self, states: Sequence[SequenceState], num_tokens: int) -> DraftTree | None:
        rows = []
        for state in states:
            ids = list(state.token_ids)
            for _ in range(num_tokens - 1):
                right = self._rng.random() < 0.7
                ids.append(next_token(ids) if right else self._rng.randrange(VOCABULARY))
            rows.append(ids[len(state.token_ids) - 1 :])
        return DraftTree.chains(torch.tensor(rows))

    def look_back(self, state: SequenceState, begin: int) -> None:
        """Guesses of the past are not known."""

    def keep_only(self, states: Collection[SequenceState]) -> None:
        """Nothing is held."""


def nodes(node: PrefixNode) -> Iterator[PrefixNode]:
    for child in node.children.values():
        yield child
        yield from nodes(child)


def wrongs(engine: Engine) -> list[str]:
    """What is wrong with the accounts of pages, rows and locks."""
    steps = engine.runner.steps
    allocator, table = steps.allocator, steps.req_to_token_pool
    free_list, page_size = allocator._free_list, allocator.page_size
    owners: Counter[int] = Counter(free_list._stack[: free_list.available].tolist())
    cached = list(nodes(steps.prefix_tree._root))
    for node in cached:
        owners.update((node.slots[::page_size] // page_size).tolist())
    held = [one for one in engine._accounts.live.values() if one.state.row is not None]
    for request in held:
        state = request.state
        own = table.req_to_token[state.row, state.num_shared : state.num_held : page_size]
        owners.update((own // page_size).tolist())
    found = []
    leaked = set(range(1, free_list.count + 1)) - set(owners)
    if leaked:
        found.append(f"{len(leaked)} pages leaked")
    if any(count > 1 for count in owners.values()):
        found.append("a page with two owners")
    if table.available_size() + len(held) != table.size:
        found.append("rows leaked")
    locks = Counter(id(node) for one in held if one.node is not None for node in one.node.path())
    if any(node.locks != locks[id(node)] for node in cached):
        found.append("a wrong number of locks")
    if steps.window_tree is not None:
        found += window_wrongs(engine, steps.window_tree, cached)
    return found


def window_wrongs(
    engine: Engine, tree: WindowPrefixTree, cached: Sequence[PrefixNode]
) -> list[str]:
    """What is wrong with the accounts of the window pool."""
    allocator, page_size = tree.swa_allocator, tree.page_size
    free_list = allocator._swa_list
    owners: Counter[int] = Counter(free_list._stack[: free_list.available].tolist())
    own = [node.slots for node in cached if node.has_window]
    for request in engine._accounts.live.values():
        state = request.state
        if state.row is not None:
            first = max(state.num_behind, state.num_shared)
            own.append(engine.runner.steps.slots(state, first, state.num_held))
    for slots in own:
        owners.update(allocator.pool.swa_pages(slots[::page_size] // page_size).tolist())
    found = []
    if set(range(1, free_list.count + 1)) != set(owners):
        found.append("window pages leaked")
    if any(count > 1 for count in owners.values()):
        found.append("a window page with two owners")
    readers = [
        one for one in engine._accounts.live.values() if one.node and one.reads_shared_window
    ]
    locks = Counter(id(node) for one in readers if one.node for node in tree._window(one.node))
    if any(node.window_locks != locks[id(node)] for node in cached):
        found.append("a wrong number of window locks")
    return found


class Workload:
    """Random arrivals, aborts and steps on one engine; counts what went wrong."""

    def __init__(self, rng: random.Random, *, page_size: int, debug: bool) -> None:
        self.rng = rng
        self.engine = Engine(
            HashingRunner(page_size=page_size, debug=debug, has_window=rng.random() < 0.5),
            prefill_tokens=13,
            drafts=Guesses(rng) if rng.random() < 0.5 else None,
            overlap=rng.random() < 0.5,
        )
        self.asked: dict[int, tuple[list[int], int]] = {}
        self.stems = [[rng.randrange(VOCABULARY) for _ in range(25)] for _ in range(3)]
        self.found: Counter[str] = Counter()
        self.answers = self.late = 0

    def act(self) -> None:
        """One call of the engine."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.3 and len(self.asked) < 12:
            ids = rng.choice(self.stems)[: rng.randrange(25)]
            ids = ids + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 12))]
            num = rng.randrange(1, 20)
            self.asked[self.engine.add(ids, max_new_tokens=num)] = ids, num
        elif kind < 0.34 and self.asked:
            victim = rng.choice(sorted(self.asked))
            self.engine.abort(victim)
            del self.asked[victim]
        elif kind < 0.36:
            self.engine.clear_cache()
        else:
            self.step()

    def step(self) -> None:
        for output in self.engine.step():
            if output.result is None:
                continue
            ids, num = self.asked.pop(output.request_id, (None, 0))
            if ids is None:
                continue  # its `add` or `abort` was interrupted after the fact
            self.answers += 1
            told, expected = output.result.token_ids, continued(ids, num)
            if output.result.finish_reason == "abort":
                expected = expected[: len(told)]  # dropped with a failed step
            if told != expected:
                self.found["a wrong answer"] += 1

    def after_fault(self) -> None:
        """Check the accounts, and drop the requests that the failed step has aborted."""
        if wrongs(self.engine):
            self.late += 1  # a second fault interrupted the repair: the next call does it
            self.engine.clear_cache()
        self.found.update(wrongs(self.engine))
        live = self.engine._accounts.live.values()
        alive = {one.id for one in live if one.finish_reason != "abort"}
        alive |= self.engine._accounts.outputs.request_ids
        for number in set(self.asked) - alive:
            del self.asked[number]

    def finish(self) -> None:
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.step()
        else:
            self.found["requests that never end"] += 1
        if self.asked:
            self.found["answers that never came"] += len(self.asked)
            self.asked.clear()


def main() -> int:
    parser = argparse.ArgumentParser(description="Raise exceptions at random lines of an engine.")
    parser.add_argument("--faults", type=int, default=10_000, help="Faults to inject.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the workload and the lines.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    scheduler.GROWTH = 1  # requests are let in boldly, so that memory runs out often
    rng = random.Random(args.seed)
    found: Counter[str] = Counter()
    places: set[str] = set()
    faults = answers = late = retractions = 0
    while faults < args.faults:
        work = Workload(rng, page_size=rng.choice([1, 4, 16]), debug=rng.random() < 0.5)
        injector = Injector(rng)
        try:
            for _ in range(300):
                if work.found:
                    break  # more of the same would follow
                if rng.random() < 0.7 or faults >= args.faults:
                    work.act()
                    continue
                try:
                    injector(work.act, lines=rng.choice([30, 300, 900]), twice=rng.random() < 0.2)
                except (KeyboardInterrupt, RuntimeError):
                    if not injector.raised:
                        raise
                    work.after_fault()
                faults += len(injector.raised)
                places.update(injector.raised)
            else:
                work.finish()
        except Exception as error:
            work.found[f"a later call raises {type(error).__name__}"] += 1
        found.update(work.found)
        answers += work.answers
        late += work.late
        retractions += work.engine.stats.retractions
    print(
        f"seed {args.seed}: {faults} faults at {len(places)} lines; {answers} answers, "
        f"{retractions} retractions; {late} repaired by the next call"
    )
    for wrong, count in found.most_common():
        print(f"{count} x {wrong}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
