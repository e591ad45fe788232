"""A part of a model that nobody knew is served through `ModelPart` alone."""

from __future__ import annotations

import pytest
import torch

from attnmux.core import ForwardContext, GraphUnsupported, InvalidInput
from attnmux.testing import RecordingGraphs
from attnmux.transformers import Engine, MemoryBudget, SequenceState
from attnmux.transformers.load import load_decoder as parts
from attnmux.transformers.model.part import ModelPart, TokenBytes

WIDTH = 4


class Mementos(ModelPart):
    """Each token's input of the first layer, summed in `WIDTH` stretches, beside its K and V."""

    uncompiled = ("mementos", "a model without them")

    def __init__(self, model):
        self.layer = model.model.layers[0]
        self.pool, self.calls, self.is_eager = None, [], False

    @classmethod
    def find(cls, model, options):
        return cls(model)

    def bind(self):
        self.calls.append("bind")
        self.layer.register_forward_pre_hook(self._write)

    def _write(self, module, args):
        if self.pool is not None:
            rows = args[0][0].unflatten(-1, (WIDTH, -1)).sum(-1)
            self.pool[ForwardContext.current().batch.out_cache_loc] = rows
            self.calls.append("eager" if self.is_eager else "captured")

    def mark(self, layers):
        self.calls.append("mark")
        return tuple(layers)

    def ask(self, ways, options):
        if options.draft_topk > 1:
            raise InvalidInput("draft_topk", got=options.draft_topk, expected="1 with mementos")
        self.calls.append("ask")
        return [way.replace(origin="model", lse=True) for way in ways]

    def bytes_per_token(self, decision):
        return TokenBytes(beside=WIDTH * 4)

    def attach(self, context, decision):
        self.calls.append("attach")
        self.pool = torch.zeros(context.token_to_kv_pool.num_slots, WIDTH)

    def captured(self, config):
        raise GraphUnsupported("mementos: their pool is written by Python")

    def eager(self, batch):
        return Flagged(self, batch)


class Flagged:
    def __init__(self, part, batch):
        self.part, self.batch = part, batch

    def __enter__(self):
        self.part.is_eager = True
        return self.batch

    def __exit__(self, *_):
        self.part.is_eager = False


@pytest.fixture
def load(monkeypatch, tiny, run_on):
    """Runners of one model, with mementos or without."""
    folder = tiny("llama")[1]

    def make(known=True, **changes):
        kinds = (*parts.KINDS, Mementos) if known else parts.KINDS
        with monkeypatch.context() as patch:
            patch.setattr(parts, "KINDS", kinds)
            return run_on(folder, **changes)

    return make


def texts(runner):
    engine = Engine(runner)
    for prompt in ([1, 2, 3], [4, 5, 6, 7, 8]):
        engine.add(prompt, max_new_tokens=6)
    tokens = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token_id)
    return tokens


def test_it_binds_asks_and_stores(load):
    runner = load()
    part = runner.part(Mementos)
    assert part.calls == ["bind", "mark", "ask", "attach"]
    assert runner.decision.request.lse
    assert runner.served.parts == (part,)
    state = SequenceState(token_ids=[5, 6, 7])
    runner.extend([state])
    assert part.calls[-1] == "eager"
    slots = runner.context.req_to_token_pool.req_to_token[state.row, :3].long()
    embeds = runner.model.get_input_embeddings()(torch.tensor([5, 6, 7]))
    torch.testing.assert_close(part.pool[slots], embeds.unflatten(-1, (WIDTH, -1)).sum(-1))


def test_it_changes_no_text(load):
    assert texts(load()) == texts(load(known=False))


def test_the_kv_pool_leaves_its_memory(load):
    budget = {"max_total_tokens": None, "memory": MemoryBudget(nbytes=300_000)}
    without, runner = load(known=False, **budget), load(**budget)
    taken = runner.context.token_to_kv_pool.nbytes + runner.part(Mementos).pool.nbytes
    assert runner.sizes.full < without.sizes.full
    assert 0.95 * 300_000 < taken <= 300_000


def test_it_is_refused_under_graphs(load):
    with pytest.raises(GraphUnsupported, match="mementos: their pool"):
        load().capture_graphs(devices=RecordingGraphs())


def test_it_is_refused_with_what_it_does_not_go_with(load):
    with pytest.raises(InvalidInput, match="draft_topk: expected 1 with mementos, got 2"):
        load(draft_tokens=4, draft_topk=2)
    with pytest.raises(InvalidInput, match="compile: expected a model without them, got mementos"):
        load().compile()


def test_its_note_reaches_the_user(load, monkeypatch):
    monkeypatch.setattr(Mementos, "note", "the model keeps mementos")
    with pytest.warns(UserWarning, match="keeps mementos"):
        load()
