"""Continuous batching: the same tokens whatever shares a step, and every page accounted for."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import zlib
from itertools import product
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from attnmux.core import (
    AttnmuxError,
    ForwardMode,
    InvalidInput,
    MHATokenToKVPool,
    PoolExhausted,
    ReqToTokenPool,
    SWAKVPool,
)
from attnmux.transformers import Engine, Prompt, StepBuilder, run_prompts
from attnmux.transformers.engine import scheduler
from attnmux.transformers.engine.scheduler import WORTH_WAITING
from attnmux.transformers.ranks import ONE_RANK
from attnmux.transformers.requests.prefixes import WindowPrefixTree, WindowSpan
from attnmux.transformers.requests.sampling_params import SamplingParams
from attnmux.transformers.requests.sequence import SequenceState
from attnmux.transformers.requests.slots import PagedAllocator, SWAAllocator

VOCABULARY = 50
PLACES = 10_000


@pytest.fixture(autouse=True)
def _one_thread():
    """Thousands of steps over a few numbers each: waking threads would take most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _bold(monkeypatch):
    """Requests are let in without regard to how they grow, so that memory runs out often."""
    monkeypatch.setattr(scheduler, "GROWTH", 1)


def next_token(ids):
    return zlib.crc32(bytes(ids)) % VOCABULARY


def continued(ids, num):
    """What the hashing model generates."""
    ids = list(ids)
    for _ in range(num):
        ids.append(next_token(ids))
    return ids[-num:]


class HashingRunner:
    """A model without weights. Its KV cache holds each token with its place; the next token is a
    hash of all that the cache holds for a request, so that one lost or foreign slot shows. With a
    span, a window layer holds the same, and what each new token's window needs must be there."""

    def __init__(
        self,
        *,
        rows=4,
        context=64,
        size=256,
        page_size=4,
        max_encoder_len=0,
        span=None,
        window_size=None,
    ):
        allocator, tree = PagedAllocator(size, page_size, "cpu"), None
        if span is not None:
            kind = {"page_size": page_size, "dtype": torch.float32, "device": "cpu"}
            kind |= {"num_kv_heads": 1, "head_dim": 1}
            full = MHATokenToKVPool(size=size, layer_ids=[0], **kind)
            allocator = SWAAllocator(
                SWAKVPool(full=full, swa=MHATokenToKVPool(size=window_size, layer_ids=[1], **kind))
            )
            tree = WindowPrefixTree(allocator, span)
            self.window_cache = torch.full((window_size + page_size,), -1)
        self.span = span
        self.steps = StepBuilder(
            ReqToTokenPool(rows, context + max_encoder_len, "cpu"),
            allocator,
            window_tree=tree,
            max_encoder_len=max_encoder_len,
        )
        self.vocabulary_size = VOCABULARY
        self.ranks = ONE_RANK
        self.verify_graphs = self.tree_kernels = None
        self.is_deterministic = False
        self.cache = torch.full((size + page_size,), -1)
        self.ran = []
        """(mode, new tokens, requests) of each step."""
        self.during = lambda: None
        """Called in the middle of each step."""
        self.damaged = set()
        """Prompts' first tokens whose logits are no numbers."""

    def check_drafts(self, topk):
        """Steps verify any."""

    def idle(self):
        return False

    def forward(self, step, indices, laps=None):
        batch = step.batch
        self.ran.append((batch.forward_mode, len(step.input_ids), batch.batch_size))
        self.cache[batch.out_cache_loc] = step.input_ids * PLACES + batch.positions
        if self.span is not None:
            self.check_windows(step)
        if step.encoder_states is not None:
            self.cache[batch.encoder_out_cache_loc] = step.encoder_states[:, 0].long()
        self.during()
        table = self.steps.req_to_token_pool.req_to_token
        logits = torch.zeros(batch.batch_size, VOCABULARY)
        lens = batch.seq_lens.tolist()
        assert lens == batch.seq_lens_cpu.tolist()
        assert sum(lens) == batch.seq_lens_sum
        encoder_lens = (
            [0] * len(lens) if batch.encoder_lens is None else batch.encoder_lens.tolist()
        )
        for place, (row, length) in enumerate(zip(batch.req_pool_indices, lens, strict=True)):
            first = encoder_lens[place]
            heard = self.cache[table[row, :first].long()].tolist()
            held = self.cache[table[row, first : first + length].long()].tolist()
            assert [one % PLACES for one in held] == list(range(length))
            ids = heard + [one // PLACES for one in held]
            logits[place, next_token(ids)] = torch.nan if ids[0] in self.damaged else 1.0
        return logits[torch.searchsorted(step.last_indices, indices)]

    def check_windows(self, step):
        """Write the window layer, and read it from the first new token's window on."""
        batch, pool = step.batch, self.steps.allocator.pool
        places = pool.translate(batch.out_cache_loc, 1)
        assert bool((places > 0).all())
        self.window_cache[places] = step.input_ids * PLACES + batch.positions
        new = [1] * batch.batch_size
        if batch.extend_seq_lens is not None:
            new = batch.extend_seq_lens.tolist()
        table = self.steps.req_to_token_pool.req_to_token
        lens = batch.seq_lens.tolist()
        for row, length, count in zip(batch.req_pool_indices, lens, new, strict=True):
            needed = range(first_visible(self.span, length - count), length)
            slots = table[row, needed.start : needed.stop].long()
            assert torch.equal(self.window_cache[pool.translate(slots, 1)], self.cache[slots])


def first_visible(span, position):
    """The first key that a window layer needs for the token at a position."""
    firsts = [position // size * size for size in span.attention_chunk_sizes]
    if span.sliding_window_size >= 0:
        firsts.append(max(position - span.sliding_window_size, 0))
    return min(firsts)


def windowed_pages(engine):
    """The pages of each request that no other shares and that have window pages."""
    steps = engine.runner.steps
    for request in engine._accounts.live.values():
        state = request.state
        if state.row is not None:
            first = max(state.num_behind, state.num_shared)
            own = steps.slots(state, first, state.num_columns)
            assert bool((steps.allocator.pool.translate(own, 1) > 0).all())
            yield len(set((own // steps.allocator.page_size).tolist()))


def check_windows(engine):
    """No window page is lost, and the tree knows which of its windows are there and locked."""
    tree, memory = engine.runner.steps.window_tree, engine.window_memory
    page_size = tree.page_size
    assert memory.held == page_size * sum(windowed_pages(engine))
    nodes, there, locked = [tree._root], 0, 0
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        own = tree.swa_allocator.pool.translate(node.slots, 1)
        assert bool((own > 0).all() if node.has_window else (own == 0).all())
        there += len(node.tokens) * node.has_window
        locked += len(node.tokens) * bool(node.has_window and node.window_locks)
    assert (memory.cached, tree.evictable_window_tokens) == (there, there - locked)
    assert engine._accounts.live or not locked


def owned_pages(engine):
    """The pages of each request that no other request shares."""
    table = engine.runner.steps.req_to_token_pool.req_to_token
    page_size = engine.runner.steps.allocator.page_size
    for request in engine._accounts.live.values():
        state = request.state
        if state.row is not None:
            own = table[state.row, state.num_shared : state.num_columns] // page_size
            yield set(own.tolist())


def check_accounts(engine):
    """Free, cached and held pages are all there are, and no page is held twice."""
    memory = engine.memory
    page_size = engine.runner.steps.allocator.page_size
    held = list(owned_pages(engine))
    assert memory.held == page_size * sum(map(len, held))
    assert sum(map(len, held)) == len(set().union(*held))
    assert memory.free + memory.cached + memory.held == engine.runner.steps.allocator.size
    if engine.window_memory is not None:
        check_windows(engine)
    rows = engine.runner.steps.req_to_token_pool
    assert rows.size - rows.available_size() == len(held)


def check_all_free(engine):
    engine.clear_cache()
    steps = engine.runner.steps
    assert not engine.has_work
    assert (engine.memory.free, engine.memory.cached) == (steps.allocator.size, 0)
    if engine.window_memory is not None:
        assert engine.window_memory.free == steps.allocator.pool.swa.size
    assert steps.req_to_token_pool.available_size() == steps.req_to_token_pool.size


def finish(engine):
    """Run to the end; the results by request id."""
    results = {}
    for _ in range(10_000):
        if not engine.has_work:
            return results
        for output in engine.step():
            if output.result is not None:
                results[output.request_id] = output.result
        check_accounts(engine)
    raise AssertionError("the engine does not come to an end")


def random_prompts(rng, num, *, longest):
    """Many of them begin alike."""
    stems = [[rng.randrange(VOCABULARY) for _ in range(longest)] for _ in range(3)]
    prompts = []
    for _ in range(num):
        shared = rng.randrange(longest)
        own = rng.randrange(1, longest - shared + 1)
        tail = [rng.randrange(VOCABULARY) for _ in range(own)]
        prompts.append(rng.choice(stems)[:shared] + tail)
    return prompts


SPANS = (
    WindowSpan(sliding_window_size=0),
    WindowSpan(sliding_window_size=5),
    WindowSpan(attention_chunk_sizes=(6,)),
    WindowSpan(sliding_window_size=3, attention_chunk_sizes=(4, 8)),
)


@pytest.mark.parametrize(
    ("page_size", "options", "span"),
    [*product((1, 4, 16), ({}, {"prefill_tokens": 7}, {"prefix_cache": False}), SPANS)],
)
@pytest.mark.usefixtures("_bold")
@pytest.mark.turns(9)
def test_windows_are_there_for_every_token_that_needs_them(span, page_size, options):
    """The window pool has room for the windows of the requests and for a page or two besides."""
    rows = 5
    window_size = rows * span.tokens_each(page_size) + 2 * page_size
    runner = HashingRunner(
        rows=rows, size=320, page_size=page_size, context=80, span=span, window_size=window_size
    )
    engine = Engine(runner, **options)
    prompts = random_prompts(random.Random(page_size), 25, longest=50)
    for ids in prompts:
        engine.add(ids, max_new_tokens=24)
    results = finish(engine)
    for index, ids in enumerate(prompts):
        assert list(results[index].token_ids) == continued(ids, 24)
    check_all_free(engine)
    assert (engine.stats.reused_tokens > 0) == options.get("prefix_cache", True)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_holds_no_more_of_the_window_pool_than_it_can_need(page_size):
    span = WindowSpan(sliding_window_size=7)
    runner = HashingRunner(
        rows=1, size=400, context=400, page_size=page_size, span=span, window_size=40
    )
    engine = Engine(runner, prefix_cache=False)
    engine.add([1] * 200, max_new_tokens=150)
    while engine.has_work:
        engine.step()
        prompt_runs = engine.stats.decode.steps < 2
        assert engine.window_memory.held <= (40 if prompt_runs else span.tokens_each(page_size))
    assert engine.stats.extend.steps > 200 // 40
    assert engine.stats.retractions == 0


def test_a_prefix_is_reused_where_its_window_is_still_there():
    """Eviction of windows leaves the ends of what was cached; a prompt that parts from it earlier
    runs again, and its windows are there for the next one."""
    span = WindowSpan(sliding_window_size=5)
    runner = HashingRunner(size=256, page_size=4, span=span, window_size=128)
    engine = Engine(runner)

    def reused(ids):
        engine.add(ids, max_new_tokens=1)
        return finish(engine).popitem()[1].reused_tokens

    stem = list(range(40))
    assert reused(stem) == 0
    assert reused([*stem[:22], 49, 48]) == 20
    tree = runner.steps.window_tree
    assert tree.window_tokens == 44
    assert tree.evict_windows(24) == 24
    assert reused([*stem, 47]) == 40
    assert reused([*stem[:22], 47]) == 20
    assert reused([*stem[:30], 49]) == 20
    assert reused([*stem[:30], 48]) == 28
    assert tree.evict_windows(128) == 28
    assert tree.window_tokens == 0
    assert reused([*stem, 46]) == 0
    check_all_free(engine)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (1024, {}),
        (1024, {"prefill_tokens": 1}),
        (1024, {"prefill_tokens": 7, "max_running": 3}),
        (1024, {"prefix_cache": False}),
        (160, {}),
        (80, {"prefill_tokens": 9}),
        (80, {"prefix_cache": False}),
        (1024, {"overlap": True}),
        (80, {"overlap": True, "max_running": 3}),
    ],
)
@pytest.mark.usefixtures("_bold")
@pytest.mark.turns(over="page_size")
def test_tokens_do_not_depend_on_what_shares_a_step(size, options, page_size):
    runner = HashingRunner(rows=6, size=size, page_size=page_size, context=80)
    engine = Engine(runner, **options)
    prompts = random_prompts(random.Random(page_size), 25, longest=50)
    wanted = [random.Random(index).randrange(1, 25) for index in range(len(prompts))]
    for ids, num in zip(prompts, wanted, strict=True):
        engine.add(ids, max_new_tokens=num)
    results = finish(engine)
    for index, (ids, num) in enumerate(zip(prompts, wanted, strict=True)):
        assert list(results[index].token_ids) == continued(ids, num)
        assert results[index].finish_reason == "length"
    check_all_free(engine)
    stats = engine.stats
    assert stats.finished == len(prompts)
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert (stats.reused_tokens > 0) == options.get("prefix_cache", True)
    if size == 80 and page_size < 16:
        assert stats.retractions > 0
    room = options.get("prefill_tokens", 8192)
    assert all(new <= room + batch for _, new, batch in runner.ran)


@pytest.mark.parametrize("page_size", [1, 4])
def test_decoding_and_releasing_do_not_wait_for_the_device(page_size):
    with FakeTensorMode():  # where no tensor has values that the host could read
        steps = StepBuilder(
            ReqToTokenPool(3, 32, "cpu"), PagedAllocator(96, page_size, "cpu", debug=False)
        )
        states = [SequenceState(token_ids=list(range(length))) for length in (4, 7, 9)]
        for state in states:  # as an extend step leaves them
            (state.row,) = steps.req_to_token_pool.alloc(1)
            state.num_cached = len(state.token_ids) - 1
            steps.allocator.alloc(state.num_cached)
        batch = steps.decode_batch(states)
        step = batch.step()
        for _ in range(6):
            step = batch.step(step.input_ids)
        assert step.batch.out_cache_loc.shape == (3,)
        steps.release(states)
        assert steps.allocator.available_size() == 96


def test_a_batch_that_decodes_past_its_context_is_refused():
    runner = HashingRunner(rows=2, context=10)
    states = [SequenceState(token_ids=list(range(length))) for length in (5, 8)]
    runner.steps.extend(states)
    for state in states:
        state.token_ids.append(1)
    batch = runner.steps.decode_batch(states)
    for _ in range(2):
        batch.step()
    before = runner.steps.req_to_token_pool.req_to_token.clone()
    with pytest.raises(InvalidInput, match="context is full"):
        batch.step()
    assert torch.equal(before, runner.steps.req_to_token_pool.req_to_token)


def test_requests_join_while_others_decode():
    runner = HashingRunner()
    engine = Engine(runner, prefill_tokens=5)
    engine.add([1, 2, 3], max_new_tokens=20)
    engine.step()
    engine.step()
    engine.add(range(12), max_new_tokens=2)
    finish(engine)
    modes = [(mode.name, new, batch) for mode, new, batch in runner.ran[:6]]
    assert modes == [
        ("EXTEND", 3, 1),
        ("DECODE", 1, 1),
        ("MIXED", 6, 2),
        ("MIXED", 6, 2),
        ("MIXED", 3, 2),
        ("DECODE", 2, 2),
    ]
    assert {mode for mode, _, _ in runner.ran[6:]} == {ForwardMode.DECODE}
    assert engine.stats.decode.steps + engine.stats.mixed.steps + 1 == len(runner.ran)


@pytest.mark.usefixtures("_bold")
@pytest.mark.parametrize("page_size", [1, 4])
def test_requests_with_an_encoder_share_nothing_and_are_retracted_whole(page_size):
    runner = HashingRunner(rows=4, size=100, page_size=page_size, max_encoder_len=20)
    engine = Engine(runner, prefill_tokens=7)
    rng = random.Random(2)
    encoders = [[rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 21))] for _ in range(9)]
    for heard in encoders:
        states = torch.tensor(heard, dtype=torch.float32).unsqueeze(1)
        engine.add([1, 2, 3, 4, 5, 6, 7, 8], max_new_tokens=25, encoder_states=states)
    with pytest.raises(InvalidInput, match="encoder_states"):
        engine.add([1], max_new_tokens=1)
    with pytest.raises(InvalidInput, match="encoder_states"):
        engine.add([1], max_new_tokens=1, encoder_states=torch.zeros(21, 1))
    results = finish(engine)
    for index, heard in enumerate(encoders):
        expected = continued([*heard, *range(1, 9)], 25)
        assert list(results[index].token_ids) == expected
    assert engine.stats.reused_tokens == 0
    assert engine.stats.retractions > 0
    check_all_free(engine)


@pytest.mark.parametrize(
    ("page_size", "length", "reused"), [(64, 65, 64), (64, 64, 0), (64, 33, 0), (1, 65, 64)]
)
def test_whole_pages_are_reused_and_one_token_is_left_to_run(page_size, length, reused):
    runner = HashingRunner(rows=2, context=128, size=512, page_size=page_size)
    engine = Engine(runner)
    for _ in range(2):
        engine.add([7] * length, max_new_tokens=1)
        (result,) = finish(engine).values()
    assert result.reused_tokens == reused
    assert engine.stats.reused_tokens == reused
    assert runner.ran[-1][1] == length - reused


def test_an_engine_takes_over_what_the_one_before_it_cached():
    runner = HashingRunner(rows=2, size=48, page_size=4)
    for number, reused in enumerate((0, 16, 0)):
        engine = Engine(runner, prefix_cache=number < 2)
        assert engine.memory.held == 0
        engine.add([7] * 18, max_new_tokens=1)
        engine.add([8 + number] * 40, max_new_tokens=9)  # needs the whole pool
        results = finish(engine)
        assert results[0].reused_tokens == reused
        assert list(results[1].token_ids) == continued([8 + number] * 40, 9)
        engine.add([7] * 18, max_new_tokens=1)
        finish(engine)
    check_all_free(engine)


def test_prompts_that_arrive_together_share_their_beginning():
    """The later ones wait until the first has run what they have in common."""
    stem = [index % VOCABULARY for index in range(WORTH_WAITING + 3)]
    runner = HashingRunner(rows=8, context=64, size=1024)
    engine = Engine(runner)
    for tail in range(6):
        engine.add([*stem, tail], max_new_tokens=4)
    results = finish(engine)
    assert [results[index].reused_tokens for index in range(6)] == [0] + 5 * [WORTH_WAITING]
    assert list(results[3].token_ids) == continued([*stem, 3], 4)
    assert runner.ran[0][2] == 1


def test_an_answer_is_a_prefix_of_the_next_question():
    engine = Engine(HashingRunner(page_size=4))
    engine.add(range(8), max_new_tokens=9)
    (first,) = finish(engine).values()
    engine.add([*first.prompt_ids, *first.token_ids, 3], max_new_tokens=1)
    (second,) = finish(engine).values()
    assert second.reused_tokens == 16


@pytest.mark.usefixtures("_bold")
def test_the_oldest_request_gets_on_when_memory_runs_out():
    """All fit into the pool at first, and none of the others does at the end."""
    runner = HashingRunner(rows=4, size=48, page_size=4, context=48)
    engine = Engine(runner)
    for start in range(4):
        engine.add([start, 1, 2, 3], max_new_tokens=40)
    order = list(finish(engine))
    assert order == [0, 1, 2, 3]
    assert engine.stats.retractions >= 3


def test_add_refuses_a_request_that_cannot_fit_alone():
    engine = Engine(HashingRunner(size=32, context=64))
    engine.add(range(30), max_new_tokens=3)
    with pytest.raises(PoolExhausted, match="36 wanted, 32 available; ask for fewer") as caught:
        engine.add(range(30), max_new_tokens=4)
    assert caught.value.wanted == 36
    assert len(finish(engine)) == 1


@pytest.mark.parametrize(
    ("ids", "changes", "named"),
    [
        ([], {}, "token_ids"),
        ([VOCABULARY], {}, "token id 50"),
        ([1] * 65, {}, "context of 64"),
        ([1.0, 2.0], {}, "token_ids: expected a list of token ids"),
        (["1"], {}, "token_ids: expected a list of token ids"),
        (torch.tensor(3), {}, "token_ids: expected a list of token ids"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens"),
        ([1], {"on_text": print}, "on_text"),
    ],
)
def test_bad_requests_change_nothing(ids, changes, named):
    engine = Engine(HashingRunner())
    with pytest.raises(InvalidInput, match=named):
        engine.add(ids, **{"max_new_tokens": 3, **changes})
    check_all_free(engine)


def test_token_ids_may_be_a_tensor():
    engine = Engine(HashingRunner())
    engine.add(torch.tensor([1, 2]), max_new_tokens=3)
    (result,) = finish(engine).values()
    assert result.prompt_ids == (1, 2)
    assert list(result.token_ids) == continued([1, 2], 3)


def test_bad_engines():
    with pytest.raises(InvalidInput, match="max_running"):
        Engine(HashingRunner(), max_running=0)
    with pytest.raises(InvalidInput, match="prefill_tokens"):
        Engine(HashingRunner(), prefill_tokens=0)


def test_stop_ids_of_the_engine_and_of_a_request():
    whole = continued([1, 2], 10)
    engine = Engine(HashingRunner(), stop_ids={whole[4]})
    engine.add([1, 2], max_new_tokens=10)
    engine.add([1, 2], max_new_tokens=10, stop_ids={whole[7]} - set(whole[:7]))
    engine.add([1, 2], max_new_tokens=10, stop_ids=())
    results = finish(engine)
    assert list(results[0].token_ids) == whole[: whole.index(whole[4]) + 1]
    assert results[0].finish_reason == "stop"
    assert list(results[2].token_ids) == whole


def test_a_known_step_is_launched_before_the_tokens_are_read():
    runner = HashingRunner()
    engine = Engine(runner, overlap=True)
    engine.add([1, 2, 3], max_new_tokens=5)
    launched = []
    while engine.has_work:
        outputs = engine.step()
        launched.append((len(outputs), len(runner.ran)))
    # The last step is known to be the last one
    assert launched == [(1, 1), (1, 3), (1, 4), (1, 5), (1, 5)]
    check_all_free(engine)


def test_a_token_after_the_stop_is_dropped_and_its_memory_freed():
    whole = continued([1, 2], 10)
    engine = Engine(HashingRunner(size=64), stop_ids={whole[4]}, overlap=True)
    engine.add([1, 2], max_new_tokens=10)
    outputs = []
    while not (outputs and outputs[-1].result):
        outputs += engine.step()
    assert [one.token_id for one in outputs] == whole[: whole.index(whole[4]) + 1]
    assert engine.has_work  # the step that was launched ahead
    assert engine.step() == []
    check_all_free(engine)


def test_a_step_that_was_launched_ahead_draws_again_after_a_restart():
    how = {"max_new_tokens": 12, "sampling": SamplingParams(seed=3, temperature=1.5)}
    engine = Engine(DrawingRunner(), overlap=True)
    request = engine.add([1, 2, 3], **how)
    for _ in range(4):
        engine.step()
    engine._accounts.intact = False  # as after an interrupt in the accounts
    assert [finish(engine)[request].token_ids] == drawn([[1, 2, 3]], [how], rows=1, page_size=4)[0]


def test_an_abort_frees_what_waits_and_what_runs():
    engine = Engine(HashingRunner(rows=2, size=64))
    ids = [engine.add([start, 5, 6], max_new_tokens=20) for start in range(4)]
    for _ in range(3):
        engine.step()
    running = engine.abort(ids[0])
    assert list(running.token_ids) == continued([0, 5, 6], 3)
    assert running.finish_reason == "abort"
    assert engine.abort(ids[3]).token_ids == ()
    check_accounts(engine)
    assert engine.abort(ids[0]) is None
    with pytest.raises(InvalidInput, match="request_id"):
        engine.abort(4)
    results = finish(engine)
    assert set(results) == {1, 2}
    assert engine.stats.aborted == 2
    check_all_free(engine)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_in_the_middle_of_a_step(overlap):
    """Whatever the step was to the request: its prompt's first or last part, or a decode."""
    for when in range(6):
        runner = HashingRunner(rows=3)
        engine = Engine(runner, prefill_tokens=6, overlap=overlap)
        ids = [engine.add(range(start, start + 10), max_new_tokens=6) for start in range(4)]

        def during(engine=engine, runner=runner, when=when, ids=ids):
            if len(runner.ran) == when + 1:
                assert engine.abort(ids[0]) is not None
                assert engine.abort(ids[3]) is not None
                with pytest.raises(InvalidInput, match="one at a time"):
                    engine.step()

        runner.during = during
        results = finish(engine)
        assert set(results) == {1, 2}
        assert list(results[1].token_ids) == continued(range(1, 11), 6)
        check_all_free(engine)


@pytest.mark.parametrize("when", range(8))
@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_failing_model_ends_only_the_requests_of_its_step(when, error, overlap):
    runner = HashingRunner(rows=2)
    engine = Engine(runner, prefill_tokens=6, overlap=overlap)
    for start in range(4):
        engine.add(range(start, start + 10), max_new_tokens=6)
    said = runner.forward

    def forward(step, indices, laps=None):
        if len(runner.ran) == when:
            runner.cache[step.batch.out_cache_loc] = -7  # K and V of a step that broke off
            runner.ran.append(None)
            raise error
        return said(step, indices, laps)

    runner.forward = forward
    lost = 0
    results = {}
    while engine.has_work:
        try:
            outputs = engine.step()
        except type(error):
            lost = engine.stats.aborted
            outputs = []
        results |= {one.request_id: one.result for one in outputs if one.result is not None}
        check_accounts(engine)
    assert 1 <= lost <= 2
    assert sorted(results) == list(range(4))
    dropped = [result for result in results.values() if result.finish_reason == "abort"]
    assert len(dropped) == lost
    for index, result in results.items():
        whole = continued(range(index, index + 10), 6)
        assert list(result.token_ids) == whole[: len(result.token_ids)]
        assert result in dropped or list(result.token_ids) == whole
    engine.add(range(10), max_new_tokens=6)
    (again,) = finish(engine).values()
    assert list(again.token_ids) == continued(range(10), 6)
    check_all_free(engine)


class OutOfMemory(TorchDispatchMode):
    """The n-th operation on tensors finds no memory."""

    def __init__(self, n):
        super().__init__()
        self.left = n

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise torch.OutOfMemoryError("no memory")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("kind", ["extend", "decode", "adopt"])
def test_a_step_that_cannot_be_made_changes_nothing(kind, page_size):
    steps = HashingRunner(page_size=page_size).steps
    shared = steps.allocator.alloc(8)
    old = [SequenceState(token_ids=list(range(length))) for length in (4, 7)]
    steps.extend(old)
    for state in old:
        state.token_ids.append(1)
    batch = steps.decode_batch(old)
    new = SequenceState(token_ids=list(range(12)))
    make = {
        "extend": lambda: steps.extend([*old, new], [1, 1, 9]),
        "decode": batch.step,
        "adopt": lambda: steps.adopt(new, shared),
    }[kind]

    def books():
        of_states = [(one.row, one.num_cached, one.num_shared) for one in (*old, new)]
        rows = steps.req_to_token_pool
        return of_states, steps.allocator.available_size(), rows.available_size(), rows._in_use[:]

    before, failures = books(), 0
    for n in range(1, 200):
        try:
            with OutOfMemory(n):
                make()
            break
        except torch.OutOfMemoryError:
            failures += 1
            assert books() == before
    assert failures > 1
    assert books() != before
    steps.release([*old, new])
    steps.allocator.free_pages(shared[::page_size] // page_size)
    assert steps.allocator.available_size() == steps.allocator.size


def test_pools_that_an_interrupt_left_undefined_are_refused_until_a_reset():
    steps = HashingRunner().steps
    state = SequenceState(token_ids=[1, 2, 3])
    steps.extend([state])
    with pytest.raises(torch.OutOfMemoryError), OutOfMemory(2):
        steps.release([state])
    with pytest.raises(InvalidInput, match="reset"):
        steps.extend([SequenceState(token_ids=[1])])
    steps.reset()
    state.forget()
    steps.extend([state])
    assert steps.allocator.available_size() == steps.allocator.size - 4


def test_exceptions_at_random_lines_lose_nothing(full, day):
    tool = Path(__file__).resolve().parents[4] / "tools" / "inject_faults.py"
    done = subprocess.run(
        [sys.executable, str(tool), "--faults", "400" if full else "100", "--seed", str(day)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_second_thread_is_refused():
    engine = Engine(HashingRunner())
    refused = []

    def call(function):
        try:
            function()
        except InvalidInput as error:
            refused.append(str(error))

    def during():
        for function in (
            engine.step,
            engine.clear_cache,
            lambda: engine.abort(0),
            lambda: engine.add([1], max_new_tokens=1),
        ):
            thread = threading.Thread(target=call, args=(function,))
            thread.start()
            thread.join()

    engine.runner.during = during
    engine.add([1, 2], max_new_tokens=1)
    (result,) = finish(engine).values()
    assert list(result.token_ids) == continued([1, 2], 1)
    assert len(refused) == 4
    assert all("another thread" in message for message in refused)
    thread = threading.Thread(target=lambda: engine.add([1], max_new_tokens=1))
    thread.start()
    thread.join()
    engine.runner.during = lambda: None
    assert len(finish(engine)) == 1


def test_a_reset_engine_begins_anew():
    engine = Engine(HashingRunner())
    foreign = engine.runner.steps.allocator.alloc(24)
    assert len(foreign) == 24
    engine.add([1, 2, 3, 4, 5], max_new_tokens=5)
    engine.step()
    engine.reset()
    check_all_free(engine)
    engine.add([1, 2], max_new_tokens=3)
    (result,) = finish(engine).values()
    assert list(result.token_ids) == continued([1, 2], 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_logits_that_are_not_numbers_end_one_request(overlap):
    runner = HashingRunner()
    runner.damaged = {9}
    engine = Engine(runner, overlap=overlap)
    engine.add([9, 1, 2, 3, 4, 5], max_new_tokens=5)
    engine.add([8, 1, 2], max_new_tokens=5)
    results = finish(engine)
    assert results[0].finish_reason == "error"
    assert list(results[1].token_ids) == continued([8, 1, 2], 5)
    with pytest.raises(AttnmuxError, match="prompt 2 are not numbers"):
        run_prompts(engine, [Prompt(token_ids=[first, 1], max_new_tokens=2) for first in (8, 9, 7)])
    check_all_free(engine)


def test_a_request_that_breaks_in_a_step_launched_ahead_ends_alone():
    runner = HashingRunner(size=64)
    whole = runner.forward

    def forward(step, indices, laps=None):
        return whole(step, indices, laps).masked_fill(
            (step.batch.seq_lens == 5)[:, None], torch.nan
        )

    runner.forward = forward
    engine = Engine(runner, overlap=True)
    engine.add([1, 2], max_new_tokens=9)
    engine.add(range(6), max_new_tokens=9)
    results = finish(engine)
    assert results[0].finish_reason == "error"
    assert list(results[0].token_ids) == continued([1, 2], 3)
    assert list(results[1].token_ids) == continued(range(6), 9)
    check_all_free(engine)


class Spelling:
    """A tokenizer of one letter a token, which fails on some of them."""

    def __init__(self, fails_on=()):
        self.fails_on = set(fails_on)

    def decode(self, ids, **_):
        if self.fails_on & set(ids):
            raise ValueError("no such letter")
        return "".join(chr(65 + one) for one in ids)


def spelled(ids):
    return Spelling().decode(ids)


def steps_until_done(engine, error):
    """All outputs, whatever comes out of the steps; and how often something did."""
    outputs, failures = [], 0
    for _ in range(1000):
        if not engine.has_work:
            return outputs, failures
        try:
            outputs += engine.step()
        except error:
            failures += 1
        check_accounts(engine)
    raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("listening", [True, False])
def test_a_tokenizer_that_fails_loses_no_output_and_no_memory(listening):
    answers = [continued([start, 5], 9 + 3 * start) for start in range(4)]
    letter = answers[1][-1]  # in the last text of one, and wherever others have it
    engine = Engine(HashingRunner(rows=4), tokenizer=Spelling({letter}))
    for start in range(4):
        on_text = (lambda piece, last: None) if listening else None
        engine.add([start, 5], max_new_tokens=9 + 3 * start, on_text=on_text)
    outputs, failures = steps_until_done(engine, ValueError)
    assert failures > 0
    for index, answer in enumerate(answers):
        mine = [one for one in outputs if one.request_id == index]
        assert [one.token_id for one in mine] == answer
        assert mine[-1].result.token_ids == tuple(answer)
        assert all(one.result is None for one in mine[:-1])
    check_all_free(engine)


def test_an_abort_whose_text_fails_still_frees():
    answer = continued([1, 5], 9)
    tokenizer = Spelling()
    engine = Engine(HashingRunner(rows=2), tokenizer=tokenizer)
    ids = [engine.add([start, 5], max_new_tokens=9) for start in (1, 2)]
    engine.step()
    tokenizer.fails_on = {answer[0]}
    with pytest.raises(ValueError, match="letter"):
        engine.abort(ids[0])
    check_accounts(engine)
    assert list(finish(engine)) == [ids[1]]
    check_all_free(engine)


def test_a_set_of_prompts_leaves_nothing_behind_when_the_tokenizer_fails():
    tokenizer = Spelling()
    engine = Engine(HashingRunner(rows=2), tokenizer=tokenizer)

    def fail(index, piece, last):
        tokenizer.fails_on = set(range(VOCABULARY))
        raise KeyboardInterrupt

    prompts = [Prompt(token_ids=[start, 5], max_new_tokens=9) for start in range(5)]
    with pytest.raises(ValueError, match="letter"):
        run_prompts(engine, prompts, on_text=fail)
    check_all_free(engine)


def test_a_failing_listener_loses_no_output():
    heard = []

    def listen(piece, last):
        heard.append(piece)
        if len(heard) % 3 == 0:
            raise OSError("gone")

    engine = Engine(HashingRunner(rows=4), tokenizer=Spelling())
    for start in range(4):
        engine.add([start, 5], max_new_tokens=1 + start, on_text=listen)
    outputs, failures = steps_until_done(engine, OSError)
    assert failures == len(heard) // 3 > 0
    results = {one.request_id: one.result for one in outputs if one.result is not None}
    for start in range(4):
        answer = continued([start, 5], 1 + start)
        assert [one.token_id for one in outputs if one.request_id == start] == answer
        assert results[start].text == spelled(answer)
    check_all_free(engine)


def test_nothing_is_said_about_a_request_that_its_listener_aborted():
    engine = Engine(HashingRunner(rows=3), tokenizer=Spelling())
    ended = {}

    def listen(piece, last):
        for one in ids[:2]:
            ended.setdefault(one, engine.abort(one))

    ids = [engine.add([start, 5], max_new_tokens=5, on_text=listen) for start in range(3)]
    outputs, _ = steps_until_done(engine, ())
    assert not {one.request_id for one in outputs} & set(ids[:2])
    for start in range(2):
        assert list(ended[ids[start]].token_ids) == continued([start, 5], 1)
    check_all_free(engine)


def test_slots_that_others_hold_are_an_error_and_not_an_endless_loop():
    runner = HashingRunner(size=32)
    foreign = runner.steps.allocator.alloc(24)
    engine = Engine(runner)
    engine.add(range(20), max_new_tokens=2)
    with pytest.raises(PoolExhausted, match="one engine at a time"):
        engine.step()
    runner.steps.allocator.free(foreign)
    assert len(finish(engine)) == 1


def test_an_engine_with_requests_takes_no_set_of_prompts():
    engine = Engine(HashingRunner())
    engine.add([1], max_new_tokens=2)
    with pytest.raises(InvalidInput, match="engine"):
        run_prompts(engine, [Prompt(token_ids=[1], max_new_tokens=1)])


class DrawingRunner(HashingRunner):
    """Logits are random numbers that follow from all that the cache holds for a request."""

    def forward(self, step, indices, laps=None):
        likeliest = super().forward(step, indices, laps).argmax(dim=-1).tolist()
        places = torch.searchsorted(step.last_indices, indices)
        noise = [torch.Generator().manual_seed(one) for one in likeliest]
        lens = step.batch.seq_lens[places].tolist()
        rows = [torch.rand(VOCABULARY, generator=one) for one in noise]
        return torch.stack([row.roll(n) for row, n in zip(rows, lens, strict=True)]) * 4


def drawn(prompts, wanted, *, rows, page_size, **options):
    """What an engine with a pool of 64 tokens draws for each prompt, and its stats."""
    runner = DrawingRunner(rows=rows, size=64, page_size=page_size, context=50)
    engine = Engine(runner, **options)
    for ids, how in zip(prompts, wanted, strict=True):
        engine.add(ids, **how)
    results = finish(engine)
    check_all_free(engine)
    return [results[one].token_ids for one in range(len(prompts))], engine.stats


@pytest.mark.usefixtures("_bold")
def test_drawn_tokens_do_not_depend_on_what_shares_a_step():
    """Over retractions, chunks, shared prefixes, limits of rows and of steps."""
    ways = [
        SamplingParams(),
        SamplingParams(seed=5, temperature=0.7),
        SamplingParams(seed=1, temperature=2, top_p=0.8),
    ]
    retractions = 0
    for seed in range(12):
        rng = random.Random(seed)
        prompts = random_prompts(rng, 10, longest=30)
        wanted = [
            {"max_new_tokens": rng.randrange(1, 20), "sampling": rng.choice(ways)} for _ in prompts
        ]
        alone, _ = drawn(prompts, wanted, rows=1, page_size=1, prefix_cache=False)
        together, stats = drawn(
            prompts,
            wanted,
            rows=6,
            page_size=rng.choice([1, 4, 16]),
            prefill_tokens=rng.choice([1, 2, 7, 8192]),
            max_running=rng.randrange(3, 7),
            overlap=rng.random() < 0.5,
        )
        assert together == alone
        retractions += stats.retractions
    assert retractions > 5


@pytest.mark.usefixtures("_bold")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("span", "num"), [(None, 10_000), (SPANS[1], 3000), (SPANS[3], 3000)])
@pytest.mark.turns(6)
def test_soak(span, num, overlap, full):
    """Thousands of arrivals, aborts and evictions at random, from outside and from within steps."""
    num = num if full else max(num // 12, 750)
    rng = random.Random(11)
    runner = HashingRunner(rows=5, context=48, size=72, page_size=4, span=span, window_size=48)
    engine = Engine(runner, prefill_tokens=13, overlap=overlap)
    asked, alive = {}, set()
    prompts = random_prompts(rng, 400, longest=25)

    def during():
        if alive and rng.random() < 0.1:
            alive.discard(victim := rng.choice(sorted(alive)))
            engine.abort(victim)

    runner.during = during
    events = results = 0
    while events < num:
        kind = rng.random()
        if kind < 0.3 and len(alive) < 12:
            ids, most = rng.choice(prompts), rng.randrange(1, 20)
            alive.add(request := engine.add(ids, max_new_tokens=most))
            asked[request] = ids, most
            events += 1
        elif kind < 0.36 and alive:
            alive.discard(victim := rng.choice(sorted(alive)))
            engine.abort(victim)
            events += 1
        elif kind < 0.4:
            events += 1
            if rng.random() < 0.2:
                engine.clear_cache()
            else:
                engine._cache.make_room(rng.randrange(72))
        else:
            for output in engine.step():
                if output.result is not None:
                    alive.discard(output.request_id)
                    ids, most = asked.pop(output.request_id)
                    assert list(output.result.token_ids) == continued(ids, most)
                    results += 1
        check_accounts(engine)
    finish(engine)
    check_all_free(engine)
    stats = engine.stats
    least = min(results, stats.retractions, stats.aborted, stats.evicted_tokens)
    assert least > num // (50 if span is None else 100)
    assert stats.reused_tokens > min(1000, num // 3)
