"""A draft model's branches: each sees its request and its own ancestors alone, and all pages are
free again after the round."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from attnmux.core import (
    ForwardContext,
    InvalidInput,
    KVPool,
    LinearLayerSpec,
    MHATokenToKVPool,
    ReqToTokenPool,
)
from attnmux.parts import DraftTree, LinearStatePool
from attnmux.testing import Case, FakeBackend, decode, fake_platform, make_setup
from attnmux.transformers import ModelProposer, StepBuilder
from attnmux.transformers.draft.branch_rows import BranchRows
from attnmux.transformers.draft.loop import DraftLoop
from attnmux.transformers.draft.paths import DraftPaths, likeliest
from attnmux.transformers.ranks import ONE_RANK
from attnmux.transformers.requests.sequence import SequenceState
from attnmux.transformers.requests.slots import PagedAllocator

VOCABULARY = 19
PLACES = 1000
ROWS, CONTEXT = 4, 40


def logits_after(path):
    """Depend on every token."""
    drawn = np.random.default_rng(zlib.crc32(bytes(path))).normal(0, 2, VOCABULARY)
    return torch.from_numpy(drawn.astype(np.float32))


class HashingDraft:
    """A draft model without weights. K and V of a token are its id and place; the logits are a hash
    of all that a token sees, so that one lost, foreign or stale slot shows."""

    vocabulary_size = VOCABULARY
    ranks = ONE_RANK
    has_compressed_keys = False
    catch_up_graphs = verify_graphs = tree_kernels = token_ids = None
    is_deterministic = False

    def __init__(self, page_size, size, **changes):
        kind = {"num_kv_heads": 1, "head_dim": 1, "v_head_dim": 1, "dtype": torch.float32}
        self.pool = MHATokenToKVPool(
            size=size, layer_ids=[1], page_size=page_size, device="cpu", **kind
        )
        table = ReqToTokenPool(ROWS, CONTEXT, "cpu")
        allocator = PagedAllocator(size, page_size, "cpu")
        self.steps = StepBuilder(table, allocator, token_to_kv_pool=self.pool, **changes)
        case = Case(name="drafts", steps=(decode(1),), page_size=page_size)
        self.context = replace(
            make_setup(case, fake_platform(), "cpu").context,
            req_to_token_pool=table,
            token_to_kv_pool=self.pool,
            max_batch_size=ROWS,
            max_context_len=CONTEXT,
        )

    def build(self, context):
        return FakeBackend(context)

    def forward(self, step, indices, laps=None):
        logits = self._run(self.steps.req_to_token_pool, step.batch, step.input_ids)
        assert indices is step.last_indices
        return logits

    def features_after(self, slots):
        return {}

    def logits(self, batch, inputs):
        context = ForwardContext.current().backend.context
        return self._run(context.req_to_token_pool, batch, inputs["input_ids"])

    def _run(self, table, batch, ids):
        codes = (ids * PLACES + batch.positions).float()
        for buffer in self.pool.get_kv_buffer(1):
            buffer[batch.out_cache_loc] = codes[:, None, None]
        seen = []
        for row, length in zip(batch.req_pool_indices, batch.seq_lens.tolist(), strict=True):
            slots = table.req_to_token[row, :length].long()
            page_size = self.pool.page_size
            assert bool((slots % page_size == torch.arange(length) % page_size).all())
            k, v = (buffer[slots, 0, 0].long().tolist() for buffer in self.pool.get_kv_buffer(1))
            assert k == v
            assert [one % PLACES for one in k] == list(range(length))
            seen.append([one // PLACES for one in k])
        return torch.stack([logits_after(each) for each in seen])


def expected_tree(states, topk, steps, num):
    """The tree that a model gives which is asked for each path anew."""

    def rows(paths):
        return torch.stack([logits_after(one) for each in paths for one in each])

    told = [[tuple(state.token_ids)] for state in states]
    paths = DraftPaths.start(*likeliest(rows(told), topk))
    parts = [(paths.scores, paths.tokens, torch.full_like(paths.tokens, -1))]
    before = torch.zeros_like(paths.tokens)
    for _ in range(steps - 1):
        told = [
            [(*own[place], token) for place, token in zip(places, tokens, strict=True)]
            for own, places, tokens in zip(
                told, before.tolist(), paths.tokens.tolist(), strict=True
            )
        ]
        paths, new = paths.grow(rows(told), sum(part[1].shape[1] for part in parts))
        before = paths.before
        parts.append([each.flatten(1) for each in (new.scores, new.tokens, new.parents)])
    found = [torch.cat(each, dim=1) for each in zip(*parts, strict=True)]
    roots = torch.tensor([state.token_ids[-1] for state in states])
    return DraftTree.best_of(roots, *found, num, topk=topk)


def check_accounts(runner, proposer):
    """What is not free is what the model has read."""
    allocator, page_size = runner.steps.allocator, runner.pool.page_size
    pages = [-(-each.num_cached // page_size) for each in proposer._read.values()]
    assert allocator.available_size() == allocator.size - page_size * sum(pages)
    rows = runner.steps.req_to_token_pool
    held = sum(each.row is not None for each in proposer._read.values())
    assert rows.available_size() == rows.size - held


def rounds(page_size, topk, steps, size, num_rounds, seed, kernels=None):
    """Random rounds of requests that come, go, wait and are aborted. How many drafted."""
    rng, drafted = random.Random(seed), 0
    runner = HashingDraft(page_size, size)
    runner.tree_kernels = kernels
    num = min(8, 1 + topk + (steps - 1) * topk * topk)
    proposer = ModelProposer(
        runner, vocabulary_size=VOCABULARY, steps=steps, topk=topk, draft_token_num=num
    )
    states, waiting = [], []
    for _ in range(num_rounds):
        while len(states) + len(waiting) < ROWS and rng.random() < 0.7:
            ids = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 18))]
            states.append(SequenceState(token_ids=ids))
        states = [each for each in states if len(each.token_ids) < CONTEXT and rng.random() > 0.05]
        if waiting and rng.random() < 0.5:
            states.append(waiting.pop())
        if len(states) > 1 and rng.random() < 0.1:
            waiting.append(states.pop(rng.randrange(len(states))))
            proposer.keep_only(states)
        if not states:
            continue
        rng.shuffle(states)
        most = rng.randint(2, num + 2)
        tree = proposer.propose(states, most)
        check_accounts(runner, proposer)
        room = CONTEXT - max(len(each.token_ids) for each in states)
        if tree is not None:
            drafted += 1
            depth = min(steps, room + 1, most - 1)
            nodes = min(num, most, 1 + topk + (depth - 1) * topk * topk)
            wanted = expected_tree(states, topk, depth, nodes)
            assert torch.equal(tree.draft_tokens, wanted.draft_tokens)
            assert torch.equal(tree.parents, wanted.parents)
            assert torch.equal(tree.depths, wanted.depths)
            assert topk == 1 or torch.equal(tree.visible, wanted.visible)
        for each in states:  # a few of the drafts, or others
            for _ in range(rng.randint(1, steps + 1)):
                each.token_ids.append(rng.randrange(VOCABULARY))
    proposer.keep_only([])
    allocator = runner.steps.allocator
    assert allocator.available_size() == allocator.size
    return drafted


@pytest.mark.parametrize("topk", [1, 2, 4])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.turns(over="page_size")
def test_nothing_leaks_in_random_rounds(page_size, topk, full, record_property) -> None:
    """The pool runs out again and again."""
    seed = random.randrange(1 << 30)
    record_property("seed", seed)
    steps = 1 + seed % 4
    shorter = 1 if full else 4
    drafted = rounds(page_size, topk, steps, 160, 500 // shorter, seed)
    assert drafted > 20 // shorter
    assert rounds(page_size, topk, 3, 960, 120 // shorter, seed) > 60 // shorter


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("topk", [2, 4])
@pytest.mark.turns(2)
def test_kernels_build_the_same_trees(topk) -> None:
    triton_trees = pytest.importorskip("attnmux.triton.functions.trees", exc_type=ImportError)
    assert rounds(4, topk, 3, 960, 25, topk, triton_trees.TritonTrees()) > 10


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
@pytest.mark.parametrize("offered", [False, True])
@pytest.mark.parametrize("topk", [1, 4])
def test_a_round_waits_once(topk, offered, monkeypatch) -> None:
    """One copy to the host, with kernels and without."""
    triton_trees = pytest.importorskip("attnmux.triton.functions.trees", exc_type=ImportError)
    runner = HashingDraft(4, 960)
    runner.tree_kernels = triton_trees.TritonTrees() if offered else None
    proposer = ModelProposer(runner, vocabulary_size=VOCABULARY, steps=3, topk=topk)
    copies = []
    copy = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copies.append(self) or copy(self))
    states = [SequenceState(token_ids=[1, 2, 3]), SequenceState(token_ids=[4, 5])]
    assert proposer.propose(states, 4) is not None
    assert len(copies) == 1


def test_a_failing_model_leaves_all_memory_free() -> None:
    runner = HashingDraft(4, 256)
    proposer = ModelProposer(runner, vocabulary_size=VOCABULARY, steps=3, topk=2)
    states = [SequenceState(token_ids=[1, 2, 3, 4, 5]), SequenceState(token_ids=[6])]
    run, runner.logits = runner.logits, None
    with pytest.raises(TypeError):
        proposer.propose(states, 8)
    allocator = runner.steps.allocator
    assert allocator.available_size() == allocator.size
    assert not runner.pool.get_key_buffer(1).any()
    runner.logits = run
    assert proposer.propose(states, 4) is not None
    proposer.keep_only([])
    assert allocator.available_size() == allocator.size


def test_a_pool_without_room_for_branches_keeps_what_was_read() -> None:
    runner = HashingDraft(4, 16)
    proposer = ModelProposer(runner, vocabulary_size=VOCABULARY, steps=3, topk=4)
    state = SequenceState(token_ids=[1, 2, 3, 4, 5])
    assert proposer.propose([state], 8) is None
    assert [each.num_cached for each in proposer._read.values()] == [5]
    check_accounts(runner, proposer)


def never_followed(self, before, slots):
    """A branch keeps the drafts of the branch that had its pages before."""


def followed_by_the_next(self, before, slots):
    pool = self._model.context.token_to_kv_pool
    sources = slots.gather(1, before.roll(1, dims=1).unsqueeze(2).expand_as(slots))
    pool.move(sources.flatten(), slots.flatten())


def stale(of_open):
    """The first draft's slot is the one of the branch before."""

    def opened(self, states, num_new):
        batch = of_open(self, states, num_new)
        slots = batch.out_cache_loc.view(-1, num_new).clone()
        slots[:, 0] = slots[:, 0].roll(1)
        return replace(batch, out_cache_loc=slots.flatten())

    return opened


@pytest.mark.parametrize(
    ("owner", "name", "mutant"),
    [
        (DraftLoop, "_follow", never_followed),
        (DraftLoop, "_follow", followed_by_the_next),
        (BranchRows, "open", stale(BranchRows.open)),
        (BranchRows, "_share", lambda self, rows, longest: None),
        (KVPool, "move", lambda self, source, target: None),
        (BranchRows, "close", lambda self: None),
    ],
    ids=["parents", "other parents", "stale slots", "no prefix", "last page", "leak"],
)
def test_mistakes_are_seen(owner, name, mutant, monkeypatch) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(AssertionError):
        rounds(4, 4, 4, 1024, 60, seed=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 0}, "steps"),
        ({"topk": 0}, "topk"),
        ({"steps": 2, "topk": 2, "draft_token_num": 8}, "draft_token_num: expected 2 to 7"),
        ({"steps": 3, "draft_token_num": 5}, "draft_token_num: expected 2 to 4"),
        ({"draft_token_num": 1}, "draft_token_num"),
        ({"topk": 20}, "topk: expected at most the vocabulary of 19"),
        ({"vocabulary_size": 20}, "the target model's vocabulary of 20, got a model of 19 tokens"),
    ],
    ids=str,
)
def test_numbers_that_make_no_draft_are_refused(given, message) -> None:
    with pytest.raises(InvalidInput, match=message):
        ModelProposer(HashingDraft(4, 64), **{"vocabulary_size": VOCABULARY, **given})


def test_paths_are_no_longer_than_a_tree_has_room() -> None:
    given = {"vocabulary_size": VOCABULARY, "topk": 2, "draft_token_num": 4}
    assert ModelProposer(HashingDraft(4, 64), steps=9, **given).steps == 3


def test_linear_layers_are_refused() -> None:
    layer = LinearLayerSpec(layer_id=0, kind="conv", conv_dims=(8,), conv_size=3)
    states = LinearStatePool(size=ROWS, layers=[layer], conv_dtype=torch.float32, device="cpu")
    runner = HashingDraft(4, 64, linear_states=states)
    with pytest.raises(InvalidInput, match="draft: expected attention in every layer"):
        ModelProposer(runner, vocabulary_size=VOCABULARY)
