"""Models with recurrent and convolutional layers: logits and text are transformers' own."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch

from attnmux.core import InvalidInput, NoBackend, Offer, Plugins, PoolExhausted
from attnmux.core.find.cpu import probe_cpu
from attnmux.testing import RecordingGraphs, fake_platform, graph_card
from attnmux.transformers import (
    Engine,
    MemoryBudget,
    Prompt,
    RunnerOptions,
    SequenceState,
    load_runner,
    open_checkpoint,
    run_prompts,
)
from attnmux.transformers.engine import scheduler
from attnmux.transformers.model.layers import TOKEN_COUNTER, record_layers
from attnmux.transformers.model.mixers.mixers import bind, has_mixers, mixers_of

KINDS = {
    "qwen3-next": {"gdn": 3},
    "qwen3.5": {"gdn": 3},
    "olmo-hybrid": {"gdn": 3},
    "kimi-linear": {"kda": 3},
    "bamba": {"mamba2": 3},
    "falcon-h1": {"mamba2": 4},
    "nemotron-h": {"mamba2": 2},
    "granite-4": {"mamba2": 3},
    "jamba": {"mamba1": 2},
    "lfm2": {"conv": 3},
    "minimax": {"lightning": 3},
    "minimax-windows": {"lightning": 3},
    "zamba": {"mamba1": 5},
    "mamba2": {"mamba2": 3},
    "falcon-mamba": {"mamba1": 3},
    "recurrent-gemma": {"mamba1": 2},
    "zaya": {"conv": 4},
    "xlstm": {"mamba2": 3},
}
PROMPT_LENS = (13, 1, 33)
NUM_DECODED = 5


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(1)
    lens = [length + NUM_DECODED for length in PROMPT_LENS]
    return [torch.randint(97, (length,), generator=generator).tolist() for length in lens]


def eager_logits(model, sequences):
    with torch.inference_mode():
        return [
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences
        ]


def assert_same(ours, theirs):
    """Both are float32, in different chunks; logits are of about 5."""
    torch.testing.assert_close(ours, theirs, atol=5e-4, rtol=1e-4)


def decoded(runner, states, sequences, theirs):
    for _ in range(NUM_DECODED):
        for state, ids in zip(states, sequences, strict=True):
            state.token_ids.append(ids[len(state.token_ids)])
        expected = [
            other[len(state.token_ids) - 1] for state, other in zip(states, theirs, strict=True)
        ]
        assert_same(runner.decode(states), torch.stack(expected))


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.turns(3)
def test_every_logit_of_prefill_and_decode(tiny, run_hybrid, sequences, architecture) -> None:
    model, folder = tiny(architecture)
    runner = run_hybrid(folder)
    assert dict(runner.decision.request.linear_layers) == KINDS[architecture]
    theirs = eager_logits(model, sequences)
    states = [
        SequenceState(token_ids=ids[:length])
        for ids, length in zip(sequences, PROMPT_LENS, strict=True)
    ]
    step = runner.steps.extend(states)
    ours = runner.forward(step, torch.arange(sum(PROMPT_LENS))).split(PROMPT_LENS)
    for mine, other, length in zip(ours, theirs, PROMPT_LENS, strict=True):
        assert_same(mine, other[:length])
    decoded(runner, states, sequences, theirs)
    runner.release(states)


@pytest.mark.parametrize("architecture", KINDS)
@pytest.mark.turns(4)
def test_prompts_in_chunks_beside_decoding(tiny, run_hybrid, sequences, architecture) -> None:
    """Chunks shorter than the convolutions' taps too; rows are used again without being cleared."""
    model, folder = tiny(architecture)
    runner = run_hybrid(folder, page_size=16)
    theirs = eager_logits(model, sequences)
    for chunks in ([7, 5], [1, 1], [3, 2], [12, 17]):
        states = [SequenceState(token_ids=list(ids)) for ids in sequences]
        runner.extend(states[::2], chunks)
        runner.extend(states[1:2], [len(sequences[1]) - 1])
        counts = [state.num_pending for state in states]
        assert counts[1] == 1
        step = runner.steps.extend(states)
        ours = runner.forward(step, torch.arange(sum(counts))).split(counts)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other[-len(mine) :])
        runner.release(states)


def some_prompts(num):
    generator = torch.Generator().manual_seed(7)
    lens = torch.randint(1, 24, (num,), generator=generator).tolist()
    prompts = [torch.randint(97, (length,), generator=generator).tolist() for length in lens]
    return [*prompts, prompts[0] + [3, 5], prompts[0]]


def tokens(engine, prompts, num):
    asked = [Prompt(token_ids=ids, max_new_tokens=num) for ids in prompts]
    return [result.token_ids for result in run_prompts(engine, asked).results]


@pytest.mark.parametrize(
    "architecture",
    [
        *("kimi-linear", "lfm2", "mamba2", "zaya", "qwen3-next", "falcon-h1", "minimax", "bamba"),
        *("jamba", "nemotron-h"),
    ],
)
@pytest.mark.turns(10)
def test_text_of_continuous_batches(tiny, run_hybrid, architecture, monkeypatch, alone) -> None:
    """Requests come and go, prompts run in chunks, and memory runs out."""
    monkeypatch.setattr(scheduler, "GROWTH", 1)
    model, folder = tiny(architecture)
    prompts = some_prompts(7)
    expected = alone(model, prompts, 9)
    roomy = run_hybrid(folder, page_size=4, debug=False)
    for options in ({}, {"prefill_tokens": 5}, {"overlap": True}):
        assert tokens(Engine(roomy, **options), prompts, 9) == expected
    tight = run_hybrid(folder, page_size=4, max_total_tokens=44)
    engine = Engine(tight, prefill_tokens=11)
    assert tokens(engine, prompts, 9) == expected
    assert engine.stats.retractions > 0


@pytest.mark.parametrize(
    "architecture",
    [
        *("qwen3-next", "falcon-h1", "recurrent-gemma", "jamba", "lfm2", "minimax", "mamba2"),
        *("bamba", "kimi-linear", "nemotron-h"),
    ],
)
@pytest.mark.turns(12)
def test_text_of_steps_replayed_from_graphs(tiny, architecture, alone) -> None:
    model, folder = tiny(architecture)
    linear = [offer for offer in Plugins.load().offers() if offer.card.name == "torch_linear"]
    fake = Offer(card=graph_card(), plugin="fake", distribution="attnmux-fake", version="1.0")
    options = RunnerOptions(max_batch_size=6, max_context_len=64, max_total_tokens=512)
    runner = load_runner(open_checkpoint(folder), fake_platform(), [fake, *linear], options)
    runner.capture_graphs(batch_sizes=[2, 4, 6], devices=RecordingGraphs())
    prompts = some_prompts(9)
    asked = [Prompt(token_ids=ids, max_new_tokens=3 + n) for n, ids in enumerate(prompts)]
    ours = [result.token_ids for result in run_prompts(Engine(runner), asked).results]
    theirs = alone(model, prompts, 3 + len(prompts))
    assert ours == [one[: len(other)] for one, other in zip(theirs, ours, strict=True)]
    assert [len(one) for one in ours] == [3 + n for n in range(len(prompts))]


def test_a_row_that_the_model_would_cut_runs_whole(tiny, run_hybrid, sequences, tmp_path) -> None:
    """xLSTM cuts long rows, and would call each layer once for each part of a step."""
    model, folder = tiny("xlstm")
    copied = Path(shutil.copytree(folder, tmp_path / "cut"))
    values = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**values, "max_inference_chunksize": 4}))
    runner = run_hybrid(copied)
    states = [SequenceState(token_ids=ids) for ids in sequences]
    theirs = torch.stack([logits[-1] for logits in eager_logits(model, sequences)])
    assert_same(runner.extend(states), theirs)


def test_states_are_counted_into_the_memory(tiny, run_hybrid) -> None:
    _, folder = tiny("qwen3-next")
    runner = run_hybrid(folder, max_total_tokens=None, memory=MemoryBudget(nbytes=100_000))
    states = runner.context.linear_states
    assert states is not None
    assert runner.context.token_to_kv_pool.nbytes + states.nbytes <= 100_000
    with pytest.raises(PoolExhausted):
        run_hybrid(folder, max_total_tokens=None, memory=MemoryBudget(nbytes=states.nbytes))


def test_layers_are_not_compiled(tiny, run_hybrid) -> None:
    _, folder = tiny("lfm2")
    with pytest.raises(InvalidInput, match="linear layers"):
        run_hybrid(folder).compile()
    with pytest.warns(match="runs uncompiled"):
        run_hybrid(folder, compile=True)


def test_without_a_backend_for_the_linear_layers(tiny) -> None:
    _, folder = tiny("lfm2")
    offers = [offer for offer in Plugins.load().offers() if offer.card.name == "torch_native"]
    options = RunnerOptions(max_batch_size=1, max_context_len=8, max_total_tokens=8)
    with pytest.raises(NoBackend, match="no backend serves these layers of the model: 3 conv"):
        load_runner(open_checkpoint(folder), probe_cpu(), offers, options)


def test_a_mixer_runs_in_a_step_alone(tiny, run_hybrid) -> None:
    _, folder = tiny("lfm2")
    runner = run_hybrid(folder)
    with pytest.raises(Exception, match="outside a step"):
        runner.model(input_ids=torch.tensor([[1, 2]]), use_cache=False)


def test_positions_are_checked_without_attention_too(tiny) -> None:
    model, _ = tiny("mamba2")
    model = copy.deepcopy(model)
    mixers = mixers_of(model)
    for mixer in mixers:
        bind(mixer)
    assert record_layers(model, max_context_len=64, mixers=mixers) == (TOKEN_COUNTER,)

    def add_places(module, args, out):
        return out + torch.arange(out.shape[1])[:, None]

    model.get_input_embeddings().register_forward_hook(add_places)
    with pytest.raises(InvalidInput, match="places in the row"):
        record_layers(model, max_context_len=64, mixers=mixers)


def test_a_recurrence_among_padding_is_refused(tiny) -> None:
    model, _ = tiny("minimax")
    (mixer, *_) = mixers_of(copy.deepcopy(model))
    bind(mixer)
    with pytest.raises(InvalidInput, match="nothing is padded"):
        mixer.module(torch.ones(1, 2, 32), attention_mask=torch.ones(1, 2))


class Strange(torch.nn.Module):
    """A mixer that asks for something the contract does not know."""

    def __init__(self, **asked) -> None:
        super().__init__()
        self.asked = asked

    def forward(self, x):
        return causal_conv1d_fn(x, torch.ones(2, 3), **self.asked)


def causal_conv1d_fn(x, weight, **_):
    """Stands for a function of transformers."""
    raise AssertionError("the function of the model's module was called")


@pytest.mark.parametrize(
    ("asked", "x", "said"),
    [
        ({"seq_idx": torch.zeros(1)}, torch.ones(1, 2, 4), "seq_idx"),
        ({"activation": "gelu"}, torch.ones(1, 2, 4), "silu or none"),
        ({}, torch.ones(2, 2, 4), "one row"),
        ({}, torch.ones(1, 2, 4), "its runner's"),
    ],
)
def test_what_the_contract_does_not_know_is_refused(asked, x, said) -> None:
    module = Strange(**asked)
    assert has_mixers(Strange)
    (mixer,) = mixers_of(module)
    bind(mixer)
    with pytest.raises(InvalidInput, match=said):
        module(x)
