"""What the tests of models with indexers share, of keys as of blocks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from attnmux.core import Offer
from attnmux.testing import RecordingGraphs, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    Prompt,
    RunnerOptions,
    load_runner,
    open_checkpoint,
    run_prompts,
)


@dataclass(frozen=True, kw_only=True)
class IndexedTexts:
    """Prompts for a model with indexers, and what it says to them."""

    seed: int
    picked: int
    """Keys that a token sees."""
    new: int
    """Tokens that each prompt gets."""
    known: dict[tuple[PreTrainedModel, tuple[int, ...]], tuple[int, ...]]
    """Text that models said alone, which takes them long."""

    @property
    def prompts(self):
        """Up to five times as long as what is picked; the later half begin as one of the first."""
        rng = random.Random(self.seed)
        first = [[rng.randrange(97) for _ in range(size)] for size in (1, self.picked - 1, 40, 57)]
        return first + [
            [*stem[:size], rng.randrange(97)]
            for stem, size in zip(first, (1, 4, 33, 48), strict=True)
        ]

    @torch.no_grad()
    def alone(self, model, ids):
        """Greedy text of the model's own attention over each whole text, without a cache."""
        text = list(self.known.get((model, tuple(ids)), ()))
        while len(text) < self.new:
            whole = torch.tensor([[*ids, *text]])
            text.append(int(model(input_ids=whole, use_cache=False).logits[0, -1].argmax()))
        self.known[model, tuple(ids)] = tuple(text)
        return tuple(text[: self.new])

    def all_alone(self, model):
        return [self.alone(model, ids) for ids in self.prompts]

    def texts(self, engine):
        asked = [Prompt(token_ids=ids, max_new_tokens=self.new) for ids in self.prompts]
        return [result.token_ids for result in run_prompts(engine, asked).results]

    def check_graphs(self, model, folder):
        """Decode steps of some of the prompts are replayed, and say what the model says."""
        offer = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
        options = RunnerOptions(
            page_size=4, max_batch_size=8, max_context_len=80, max_total_tokens=512
        )
        runner = load_runner(open_checkpoint(folder), fake_platform(), [offer], options)
        runner.capture_graphs(batch_sizes=[1, 2, 4], devices=RecordingGraphs())
        ran = []
        replay = runner.graphs.replay
        runner.graphs.replay = lambda batch, inputs, *, size: (
            ran.append(batch.batch_size) or replay(batch, inputs, size=size)
        )
        asked = [
            Prompt(token_ids=ids, max_new_tokens=self.new - place % 4)
            for place, ids in enumerate(self.prompts[:4])
        ]
        found = [result.token_ids for result in run_prompts(Engine(runner), asked).results]
        whole = [self.alone(model, ids) for ids in self.prompts[:4]]
        assert found == [text[: self.new - place % 4] for place, text in enumerate(whole)]
        assert {1, 3} <= set(ran)


@pytest.fixture(scope="session")
def indexed_texts():
    """The class, for tests of models with indexers, which share what models said."""
    return partial(IndexedTexts, known={})
