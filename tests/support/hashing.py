"""A model without weights for tests of the engine, and what they check after each step."""

from __future__ import annotations

import zlib
from types import SimpleNamespace

import torch

from attnmux.core import ForwardMode, MHATokenToKVPool, ReqToTokenPool, SWAKVPool
from attnmux.transformers import StepBuilder
from attnmux.transformers.ranks import ONE_RANK
from attnmux.transformers.requests.prefixes import WindowPrefixTree, WindowSpan
from attnmux.transformers.requests.slots import PagedAllocator, SWAAllocator

VOCABULARY = 50
PLACES = 10_000


def next_token(ids):
    """Depends on every token; often a small one, so that drafts from the text are often right."""
    number = zlib.crc32(bytes(ids))
    return number % 3 if number % 4 else number % VOCABULARY


def continued(ids, num):
    ids = list(ids)
    for _ in range(num):
        ids.append(next_token(ids))
    return ids[-num:]


class HashingRunner:
    """A model without weights. K and V of a token are its id and place; the next token is a hash of
    all that a token sees, so that one lost, foreign or stale slot shows."""

    def __init__(
        self,
        *,
        rows=5,
        context=48,
        size=96,
        page_size=4,
        window=None,
        graphs=None,
    ):
        """window: layer 3 has one of so many earlier tokens, and a pool of its own. graphs: the
        config of graphs that verify; it only shapes the steps here."""
        kind = {"page_size": page_size, "dtype": torch.float32, "device": "cpu"}
        kind |= {"num_kv_heads": 1, "head_dim": 2, "v_head_dim": 1}
        tree, self.window = None, window
        if window is None:
            self.pool = MHATokenToKVPool(size=size, layer_ids=[0, 3], **kind)
            allocator = PagedAllocator(size, page_size, "cpu")
        else:
            span = WindowSpan(sliding_window_size=window)
            window_size = rows * span.tokens_each(page_size)
            self.pool = SWAKVPool(
                full=MHATokenToKVPool(size=size, layer_ids=[0], **kind),
                swa=MHATokenToKVPool(size=window_size, layer_ids=[3], **kind),
            )
            allocator = SWAAllocator(self.pool)
            tree = WindowPrefixTree(allocator, span)
        self.steps = StepBuilder(
            ReqToTokenPool(rows, context, "cpu"),
            allocator,
            token_to_kv_pool=self.pool,
            window_tree=tree,
        )
        self.vocabulary_size = VOCABULARY
        self.during = lambda: None
        """Called in the middle of each step."""
        self.damaged = lambda ids: False
        """Whether the logits after these tokens are no numbers."""
        self.ranks = ONE_RANK
        self.verify_graphs = graphs and SimpleNamespace(config=graphs)
        self.tree_kernels = None
        self.is_deterministic = False
        self.steps_with_drafts = self.padded_steps = 0

    def check_drafts(self, topk):
        """Steps verify any."""

    def idle(self):
        return False

    def forward(self, step, indices, laps=None):
        batch = step.batch
        codes = (step.input_ids * PLACES + batch.positions).float()
        for layer_id in self.pool.layer_ids:
            places = self.pool.translate(batch.out_cache_loc, layer_id)
            for buffer in self.pool.get_kv_buffer(layer_id):
                buffer[places] = codes[:, None, None]
        self.during()
        assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist()
        assert sum(batch.seq_lens.tolist()) == batch.seq_lens_sum
        if batch.forward_mode is ForwardMode.TARGET_VERIFY:
            self.steps_with_drafts += 1
            seen = self._seen_by_drafts(batch)
            self.padded_steps += any(ids is None for ids in seen)
            seen = [ids or [0] for ids in seen]
        else:
            assert batch.spec_info is None
            seen = [
                self._held(row, range(length))
                for row, length in zip(batch.req_pool_indices, batch.seq_lens, strict=True)
            ]
            indices = torch.searchsorted(step.last_indices, indices)
        return self.logits([seen[index] for index in indices])

    def logits(self, seen):
        rows = torch.zeros(len(seen), VOCABULARY)
        for row, ids in zip(rows, seen, strict=True):
            row[next_token(ids)] = torch.nan if self.damaged(ids) else 1.0
        return rows

    def _seen_by_drafts(self, batch):
        """The tokens that each draft token sees."""
        spec, prefixes = batch.spec_info, batch.seq_lens.tolist()
        num = spec.draft_token_num
        seen = []
        for place, (row, prefix) in enumerate(zip(batch.req_pool_indices, prefixes, strict=True)):
            visible = torch.ones(num, prefix + num, dtype=torch.bool).tril(prefix)
            assert spec.custom_mask is None
            if spec.visible is not None:
                visible[:, prefix:] = spec.visible[place]
            slots = batch.out_cache_loc[place * num : (place + 1) * num].tolist()
            assert all(slots) or not any(slots[slots.index(0) :])
            for node, (slot, keep) in enumerate(zip(slots, visible, strict=True)):
                columns = keep.nonzero().flatten().tolist()
                if not slot and spec.visible is not None:
                    assert columns == [*range(prefix), prefix + node]
                seen.append(self._held(row, columns) if slot else None)
        return seen

    def _held(self, row, columns):
        slots = self.steps.req_to_token_pool.req_to_token[row, list(columns)].long()
        held = None
        for layer_id in self.pool.layer_ids:
            seen = 0 if self.window is None or layer_id == 0 else -self.window - 1
            places = self.pool.translate(slots, layer_id)[seen:]
            k, v = (buffer[places] for buffer in self.pool.get_kv_buffer(layer_id))
            stored = k[:, 0, 0].long().tolist()
            assert stored == k[:, 0, 1].long().tolist() == v[:, 0, 0].long().tolist()
            held = held or stored
            assert stored == held[seen:]
        assert [one % PLACES for one in held] == list(range(len(held)))
        return [one // PLACES for one in held]


def check_accounts(engine):
    """Free, cached and held pages are all there are, and no page is held twice."""
    steps, memory = engine.runner.steps, engine.memory
    page_size, table = steps.allocator.page_size, steps.req_to_token_pool.req_to_token
    held, windowed = [], []
    for request in engine._accounts.live.values():
        state = request.state
        if state.row is not None:
            assert state.num_cached < len(state.token_ids)
            own = table[state.row, state.num_shared : state.num_held] // page_size
            held.append(set(own.tolist()))
        if state.row is not None and engine.window_memory is not None:
            own = steps.slots(state, max(state.num_behind, state.num_shared), state.num_held)
            assert bool((steps.allocator.pool.translate(own, 3) > 0).all())
            windowed.append(len(set((own // page_size).tolist())))
    if engine.window_memory is not None:
        assert engine.window_memory.held == page_size * sum(windowed)
    assert memory.held == page_size * sum(map(len, held))
    assert sum(map(len, held)) == len(set().union(*held))
    assert memory.free + memory.cached + memory.held == steps.allocator.size


def check_all_free(engine):
    engine.clear_cache()
    steps = engine.runner.steps
    assert (engine.memory.free, engine.memory.cached) == (steps.allocator.size, 0)
    if engine.window_memory is not None:
        assert engine.window_memory.free == steps.allocator.pool.swa.size
    assert steps.req_to_token_pool.available_size() == steps.req_to_token_pool.size


def finish(engine):
    """Step until all have ended. Returns the results by id."""
    results, told = {}, {}
    while engine.has_work:
        for output in engine.step():
            told.setdefault(output.request_id, []).append(output.token_id)
            if output.result is not None:
                results[output.request_id] = output.result
        check_accounts(engine)
    for request, result in results.items():
        if result.finish_reason not in ("error", "abort"):
            assert result.token_ids[-len(told[request]) :] == tuple(told[request])
    return results


class DrawingRunner(HashingRunner):
    """Logits are random numbers that follow from all that a token sees."""

    def logits(self, seen):
        rows = []
        for ids in seen:
            noise = torch.Generator().manual_seed(zlib.crc32(bytes(ids)))
            rows.append(torch.rand(VOCABULARY, generator=noise) + 3 * (torch.arange(50) < 3))
        return torch.stack(rows)
