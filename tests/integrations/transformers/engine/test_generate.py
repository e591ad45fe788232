"""Generating text: greedy as transformers does it, sampling, ends, streaming, memory."""

from __future__ import annotations

import random
import shutil
from itertools import product

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attnmux.core import AttnmuxError, InvalidInput, PoolExhausted
from attnmux.transformers import (
    Engine,
    Prompt,
    Sampler,
    SamplingParams,
    SequenceState,
    encode_prompts,
    open_checkpoint,
    recall,
    run_prompts,
)
from attnmux.transformers.requests.sampling import NOT_A_NUMBER, sample
from attnmux.transformers.requests.text import TextStream

PROMPTS = [[5, 9, 2], [7], list(range(1, 30))]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(recall.PATH)


def generate(runner, prompts, *, max_new_tokens, sampling=None, on_text=None, **options):
    """All prompts on an engine of their own, whose cache is cleared afterwards."""
    engine = Engine(runner, **options)
    each = (sampling or SamplingParams()).for_each(len(prompts))
    try:
        return run_prompts(
            engine,
            [
                Prompt(token_ids=ids, max_new_tokens=max_new_tokens, sampling=params)
                for ids, params in zip(prompts, each, strict=True)
            ],
            on_text=on_text,
        )
    finally:
        engine.clear_cache()


def draw(params, logits, num=1):
    """A token for each of `num` requests that see the same logits."""
    samplers = [Sampler(each) for each in params.for_each(num)]
    return sample(logits.expand(num, -1), samplers)


def free_memory(runner):
    return (
        runner.steps.allocator.available_size(),
        runner.context.req_to_token_pool.available_size(),
    )


def all_memory(runner):
    return runner.context.token_to_kv_pool.size, runner.context.max_batch_size


def tokens_of(generation):
    return [list(result.token_ids) for result in generation.results]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt-oss", "deepseek-v2"])
def test_greedy_tokens_are_those_of_transformers(tiny, run_on, architecture):
    model, folder = tiny(architecture)
    runner = run_on(folder, page_size=4)
    generation = generate(runner, PROMPTS, max_new_tokens=12)
    for ids, result in zip(PROMPTS, generation.results, strict=True):
        whole = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0].tolist()
        assert result.prompt_ids == tuple(ids)
        assert list(result.token_ids) == whole[len(ids) :]
        assert result.finish_reason == "length"
        assert result.text is None
    assert free_memory(runner) == all_memory(runner)
    timings = generation.timings
    assert timings.prefill_tokens == sum(map(len, PROMPTS))
    assert timings.decode_tokens == 11 * len(PROMPTS)
    assert timings.prefill_tokens_per_second > 0
    assert timings.decode_tokens_per_second > 0


@pytest.mark.parametrize("prefill_tokens", [1, 4, 30, 33, 1000])
def test_prefill_in_steps_of_any_size_gives_the_same(tiny, run_on, prefill_tokens):
    runner = run_on(tiny("llama")[1], page_size=4)
    whole = generate(runner, PROMPTS, max_new_tokens=5)
    steps = generate(runner, PROMPTS, max_new_tokens=5, prefill_tokens=prefill_tokens)
    assert tokens_of(steps) == tokens_of(whole)


def test_a_stop_id_ends_one_request_and_not_the_others(tiny, run_on):
    runner = run_on(tiny("llama")[1])
    free = tokens_of(generate(runner, PROMPTS, max_new_tokens=10))
    stop = next(token for token in free[0][2:] if token not in free[0][:2])
    generation = generate(runner, PROMPTS, max_new_tokens=10, stop_ids={stop})
    for before, result in zip(free, generation.results, strict=True):
        cut = before[: before.index(stop) + 1] if stop in before else before
        assert list(result.token_ids) == cut
        assert result.finish_reason == ("stop" if stop in before else "length")
    assert generation.results[0].finish_reason == "stop"


def test_a_finished_request_frees_its_memory_for_the_others(tiny, run_on):
    """The pool holds what runs at a time, and less than what all prompts need to their ends."""
    runner = run_on(tiny("llama")[1], page_size=4, max_batch_size=2, max_total_tokens=36)
    prompts = [list(range(1, 21)), [3]]
    stop = tokens_of(generate(runner, prompts, max_new_tokens=2))[0][0]
    generation = generate(runner, prompts, max_new_tokens=24, stop_ids={stop})
    assert generation.results[0].token_ids == (stop,)
    assert free_memory(runner) == all_memory(runner)


def test_a_full_context_ends_a_request(tiny, run_on):
    runner = run_on(tiny("llama")[1], max_context_len=8)
    generation = generate(runner, [[1, 2, 3], [4] * 8], max_new_tokens=50)
    lens = [len(result.token_ids) for result in generation.results]
    assert lens == [6, 1]  # the last token is never run, so it needs no room
    assert {result.finish_reason for result in generation.results} == {"length"}


def test_too_little_memory_is_an_error_that_holds_on_to_nothing(tiny, run_on):
    runner = run_on(tiny("llama")[1], max_total_tokens=40)
    with pytest.raises(PoolExhausted, match="prompt 3") as caught:
        generate(runner, PROMPTS, max_new_tokens=20)
    assert caught.value.wanted > caught.value.available
    assert free_memory(runner) == all_memory(runner)
    assert len(generate(runner, PROMPTS, max_new_tokens=2).results) == 3


def test_a_pool_that_cannot_be_is_refused(tiny, run_on):
    with pytest.raises(PoolExhausted, match="bytes"):
        run_on(tiny("llama")[1], max_total_tokens=10**12)


def test_an_interrupt_holds_on_to_nothing(tiny, run_on, tokenizer):
    runner = run_on(tiny("llama")[1])

    def interrupt(index, piece, finished):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(runner, PROMPTS, max_new_tokens=20, on_text=interrupt, tokenizer=tokenizer)
    assert free_memory(runner) == all_memory(runner)


@pytest.mark.parametrize(
    ("prompts", "max_new_tokens", "named"),
    [
        ([], 5, "prompts"),
        ([[1], []], 5, "prompt 2"),
        ([[1] * 65], 5, "prompt 1"),
        ([[97]], 5, "prompt 1"),
        ([[-1]], 5, "prompt 1"),
        ([[1]], 0, "max_new_tokens"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tiny, run_on, prompts, max_new_tokens, named):
    runner = run_on(tiny("llama")[1])
    with pytest.raises(InvalidInput, match=named):
        generate(runner, prompts, max_new_tokens=max_new_tokens)
    assert free_memory(runner) == all_memory(runner)


def test_logits_that_are_no_numbers_are_an_error(tiny, run_on):
    runner = run_on(tiny("llama")[1])
    with torch.no_grad():
        runner.model.lm_head.weight[3] = torch.nan
    with pytest.raises(AttnmuxError, match="not numbers"):
        generate(runner, PROMPTS, max_new_tokens=3)


def test_steps_change_nothing_when_they_do_not_fit(tiny, run_on):
    runner = run_on(tiny("llama")[1], max_batch_size=2, max_total_tokens=16, max_context_len=32)
    states = [SequenceState(token_ids=[1] * 8) for _ in range(3)]
    with pytest.raises(PoolExhausted, match="rows"):
        runner.extend(states)
    long = SequenceState(token_ids=[1] * 20)
    with pytest.raises(PoolExhausted):
        runner.extend([states[0], long])
    too_long = SequenceState(token_ids=[1] * 33)
    with pytest.raises(InvalidInput, match="context"):
        runner.extend([too_long])
    with pytest.raises(InvalidInput, match="num_new"):
        runner.extend([states[0]], [9])
    with pytest.raises(InvalidInput, match="states"):
        runner.decode([states[0]])
    with pytest.raises(InvalidInput, match="states"):
        runner.extend([states[0], states[0]])
    assert all(state.row is None and state.num_cached == 0 for state in [*states, long])
    assert free_memory(runner) == all_memory(runner)


@pytest.mark.parametrize("page_size", [1, 4])
def test_decode_refuses_what_does_not_fit_before_it_takes_a_slot(tiny, run_on, page_size):
    """Past its row a request would write its slots into the next one's."""
    runner = run_on(tiny("llama")[1], page_size=page_size, max_context_len=8)
    full, short = SequenceState(token_ids=[1] * 8), SequenceState(token_ids=[2] * 3)
    runner.extend([full, short])
    before = free_memory(runner)
    for state in (full, short):
        state.token_ids.append(5)
    with pytest.raises(InvalidInput, match="context of 8"):
        runner.decode([short, full])
    with pytest.raises(InvalidInput, match="states"):
        runner.decode([short, short])
    assert free_memory(runner) == before
    assert (full.num_cached, short.num_cached) == (8, 3)
    runner.decode([short])
    runner.release([full, short])
    assert free_memory(runner) == all_memory(runner)


def test_sampling_is_reproducible_and_independent_of_the_batch(tiny, run_on):
    runner = run_on(tiny("llama")[1])
    warm = SamplingParams(temperature=0.9, top_p=0.95, seed=7)
    together = tokens_of(generate(runner, PROMPTS, max_new_tokens=8, sampling=warm))
    assert tokens_of(generate(runner, PROMPTS, max_new_tokens=8, sampling=warm)) == together
    alone = tokens_of(generate(runner, PROMPTS[:1], max_new_tokens=8, sampling=warm))
    assert alone == together[:1]
    other = SamplingParams(temperature=0.9, top_p=0.95, seed=8)
    assert tokens_of(generate(runner, PROMPTS, max_new_tokens=8, sampling=other)) != together


def test_samples_follow_the_distribution():
    """4,000 draws of one step: frequencies within five standard deviations."""
    num = 4000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    tokens = draw(SamplingParams(temperature=0.5, seed=3), logits, num)
    expected = (logits / 0.5).softmax(-1)
    observed = torch.bincount(tokens, minlength=5) / num
    sigma = (expected * (1 - expected) / num).sqrt()
    assert bool(((observed - expected).abs() <= 5 * sigma).all())


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    tokens = draw(SamplingParams(temperature=1.0, top_p=0.7, seed=1), logits, 500)
    assert set(tokens.tolist()) == {0, 1}


def test_requests_of_one_step_are_sampled_each_in_its_own_way():
    """Parameters of any mix give what each request draws alone."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=0.7, top_p=0.9, seed=2),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, seed=4),
    ]
    together = sample(logits, [Sampler(each) for each in params])
    alone = [sample(logits[row : row + 1], [Sampler(each)]) for row, each in enumerate(params)]
    assert torch.equal(together, torch.cat(alone))
    assert together[0] == logits[0].argmax()


def test_a_draw_of_zero_takes_no_impossible_token(monkeypatch):
    monkeypatch.setattr(Sampler, "draw", lambda _: 0.0)
    params = SamplingParams(temperature=1.0)
    assert draw(params, torch.tensor([[float("-inf"), 0.0, 0.0]])).tolist() == [1]


def test_the_largest_draw_takes_a_possible_token(monkeypatch):
    monkeypatch.setattr(Sampler, "draw", lambda _: 1 - 2**-53)
    params = SamplingParams(temperature=1.0)
    logits = torch.cat([torch.randn(200, 50) * 8, torch.full((200, 9), float("-inf"))], dim=1)
    tokens = sample(logits, [Sampler(params) for _ in range(200)])
    assert bool((tokens < 50).all())


@pytest.mark.parametrize("temperature", [0, 1e-30, 1e-300])
def test_a_tiny_temperature_is_greedy_and_overflows_nowhere(temperature):
    logits = torch.tensor([[3e4, 3e4 - 1, -3e4]])
    assert draw(SamplingParams(temperature=temperature), logits).tolist() == [0]


def test_a_temperature_may_be_a_whole_number():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    whole, real = (draw(SamplingParams(temperature=value), logits, 20) for value in (1, 1.0))
    assert torch.equal(whole, real)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_no_token(temperature, damage):
    """And does not touch the others: an index past the vocabulary would break the next step."""
    logits = torch.tensor([[0.0, 50.0, 0.0], [0.0, damage, 1.0], [float("-inf")] * 3])
    samplers = [Sampler(each) for each in SamplingParams(temperature=temperature).for_each(3)]
    assert sample(logits, samplers).tolist() == [1, NOT_A_NUMBER, NOT_A_NUMBER]


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"seed": -1},
    ],
)
def test_sampling_parameters_are_checked(given):
    with pytest.raises(InvalidInput, match=next(iter(given))):
        SamplingParams(**given)


TEXTS = [
    "naïve café",
    "日本語 テスト",
    "emoji 👩‍👩‍👧‍👦 end",
    "plain",
    "🙂" * 20,
    " lead and trail ",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_streams_in_whole_characters(tokenizer, text):
    """The tokenizer has a token a byte: every character beyond ASCII comes in parts."""
    stream = TextStream(tokenizer, tokenizer("prompt")["input_ids"])
    pieces = [stream.put(token) for token in tokenizer(text)["input_ids"]]
    assert "".join(pieces) == text
    assert stream.end() == ""
    assert all("\ufffd" not in piece for piece in pieces)
    assert sum(map(bool, pieces)) == len(text)


@pytest.fixture(scope="module")
def byte_fallback():
    """A tokenizer as Llama 2, Mistral and Gemma have it: characters that it does not know come as
    bytes, and one bad byte makes replacement characters of all the bytes around it."""
    alphabet = "\u2581abcdefghijklmnopqrstuvwxyz"
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("prompt", ["hi", "日本語日本語", "a long prompt 日本", "é é ééé"])
@pytest.mark.parametrize(
    "text", ["日本語テスト日本語テスト ok", "🙂" * 8, "é🙂" * 4 + " x", " plain"]
)
def test_bytes_stream_in_whole_characters_too(byte_fallback, prompt, text):
    start = len(byte_fallback(prompt)["input_ids"])
    ids = byte_fallback(prompt + text)["input_ids"]
    stream = TextStream(byte_fallback, ids[:start])
    pieces = [stream.put(token) for token in ids[start:]]
    assert "".join(pieces) == text
    assert stream.end() == ""
    assert sum(map(bool, pieces)) == len(text)


def test_undecodable_prompt_bytes_are_not_streamed(tokenizer):
    stream = TextStream(tokenizer, [0xFF] * 20)
    assert stream.put(ord("a")) + stream.end() == "a"


def test_bytes_that_never_become_a_character_come_at_the_end(tokenizer):
    stream = TextStream(tokenizer, [])
    ids = [*b"ab", *"é".encode()[:1]]
    assert [stream.put(token) for token in ids] == ["a", "b", ""]
    assert stream.end() == "\ufffd"


def test_a_prompt_that_ends_inside_a_character_is_completed(tokenizer):
    first, second = "é".encode()
    stream = TextStream(tokenizer, [*b"caf", first])
    assert stream.put(second) == "é"


def test_streamed_pieces_are_the_text(run_on, tokenizer):
    runner = run_on(recall.PATH)
    prompts = [tokenizer(text)["input_ids"] for text in ("k417, x90 ?k", "k417, x90 ?x")]
    said = {0: [], 1: []}
    ends = []

    def hear(index, piece, finished):
        said[index].append(piece)
        if finished:
            ends.append(index)

    generation = generate(
        runner,
        prompts,
        max_new_tokens=10,
        on_text=hear,
        tokenizer=tokenizer,
        stop_ids={tokenizer.eos_token_id},
    )
    assert [result.text for result in generation.results] == ["417", "90"]
    assert ["".join(pieces) for pieces in said.values()] == ["417", "90"]
    assert sorted(ends) == [0, 1]
    assert len(said[0]) > 1


@pytest.mark.parametrize(
    ("length", "page_size"),
    [*product((32, 200, 900), (1, 16)), (1500, 16)],
)
@pytest.mark.turns(6)
def test_the_shipped_model_recalls(run_on, tokenizer, page_size, length):
    """A wrong page, prefix or mask gives a wrong answer. The seed is one that the model knows in
    transformers' own attention as well."""
    rng = random.Random(length)
    asked = [recall.make_prompt(rng, length) for _ in range(6)]
    runner = run_on(
        recall.PATH,
        page_size=page_size,
        max_batch_size=6,
        max_context_len=length + 8,
        max_total_tokens=6 * (length + 8),
        dtype="float32",  # many CPUs multiply bfloat16 slowly
    )
    ids = [tokenizer(prompt)["input_ids"] for prompt, _ in asked]
    generation = generate(
        runner,
        ids,
        max_new_tokens=8,
        tokenizer=tokenizer,
        stop_ids={tokenizer.eos_token_id},
        prefill_tokens=600,
    )
    assert [result.text for result in generation.results] == [answer for _, answer in asked]
    assert {result.finish_reason for result in generation.results} == {"stop"}


def test_a_chat_template_is_applied(tmp_path):
    shutil.copytree(recall.PATH, tmp_path / "m", ignore=shutil.ignore_patterns("*.py", "__*"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (tmp_path / "m" / "chat_template.jinja").write_text(template)
    checkpoint = open_checkpoint(tmp_path / "m")
    (ids,) = encode_prompts(checkpoint, ["hi"], max_context_len=100, chat=True)
    assert bytes(ids).decode() == "<user>hi<assistant>"
    (raw,) = encode_prompts(checkpoint, ["hi"], max_context_len=100)
    assert bytes(raw) == b"hi"
    with pytest.raises(InvalidInput, match="chat template"):
        encode_prompts(open_checkpoint(recall.PATH), ["hi"], max_context_len=100, chat=True)


def test_a_chat_template_that_does_not_end_is_refused(tmp_path, monkeypatch):
    shutil.copytree(recall.PATH, tmp_path / "m", ignore=shutil.ignore_patterns("*.py", "__*"))
    # It ends after a while, so that its thread does not slow down the tests that follow.
    template = "{% for a in range(50) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "m" / "chat_template.jinja").write_text(template)
    monkeypatch.setattr("attnmux.transformers.load.tokenization.TEMPLATE_SECONDS", 0.01)
    with pytest.raises(InvalidInput, match=r"chat template that did not end within 0\.01 s"):
        encode_prompts(open_checkpoint(tmp_path / "m"), ["hi"], max_context_len=100, chat=True)
