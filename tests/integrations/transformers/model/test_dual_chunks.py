"""Qwen2.5-1M's attention, which transformers does not have: stated here in float64."""

from __future__ import annotations

import json
import math
import random
import shutil

import pytest
import torch
import transformers
from click.testing import CliRunner
from transformers import AttentionInterface

from attnmux.core import InvalidInput, NoBackend, Request
from attnmux.core.cli.verbs import verbs
from attnmux.testing import cases_in_shape, fake_card, fake_platform, run_case
from attnmux.testing.run.candidate import Candidate
from attnmux.transformers import Engine, Prompt, SequenceState, open_checkpoint, run_prompts
from attnmux.transformers.model.attention import set_attention
from attnmux.transformers.model.dual_chunks import DualChunks

CHUNK, LOCAL = 12, 4
C = CHUNK - LOCAL
BASE = 10_000.0


def rotated(rows, places):
    """rows [T, D] float64, rotated as rotary embeddings of two halves do."""
    half = rows.shape[-1] // 2
    angles = places.double()[:, None] * BASE ** (-torch.arange(half).double() / half)
    left, right = rows[:, :half], rows[:, half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def statement(trained):
    """Attention over rows that nobody rotated yet, pair by pair of chunks."""

    def attention(module, query, key, value, attention_mask, scaling=None, **_):
        count = query.shape[2]
        place = torch.arange(count)
        within, chunk = place % C, place // C
        group = query.shape[1] // key.shape[1]
        grown = torch.tensor(
            [max(1.0, 0.1 * math.log((i + 1) / trained) + 1) if trained else 1.0 for i in place]
        ).double()
        heads = []
        for head in range(query.shape[1]):
            q, k = query[0, head].double(), key[0, head // group].double()
            k = rotated(k, within)
            sides = [
                rotated(q, within) @ k.T,
                rotated(q, (within + C).clamp(max=CHUNK)) @ k.T,
                rotated(q, torch.full_like(within, min(2 * C - 1, CHUNK))) @ k.T,
            ]
            apart = (chunk[:, None] - chunk[None]).clamp(0, 2)
            logits = torch.stack(sides).gather(0, apart[None])[0] * scaling * grown[:, None]
            logits.masked_fill_(place[None] > place[:, None], -torch.inf)
            heads.append(logits.softmax(-1) @ value[0, head // group].double())
        return torch.stack(heads, dim=1).to(query.dtype).unsqueeze(0), None

    return attention


@pytest.fixture(scope="module", params=[0, 20], ids=["as trained", "beyond training"])
def chunked(request, tmp_path_factory):
    """(the logits of a text by the statement, the checkpoint's folder)"""
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
        **dict.fromkeys(["bos_token_id", "eos_token_id", "pad_token_id"]),
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        dual_chunk_attention_config={
            "chunk_size": CHUNK,
            "local_size": LOCAL,
            "original_max_position_embeddings": request.param,
        },
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("chunked")
    model.save_pretrained(folder)
    model.double()
    AttentionInterface.register("statement", statement(request.param))
    set_attention(model, "statement")

    @torch.inference_mode()
    def logits(ids):
        given = {"input_ids": torch.tensor([ids]), "position_ids": torch.zeros(1, len(ids)).long()}
        return model(**given, use_cache=False).logits[0]

    yield logits, folder
    AttentionInterface._global_mapping.pop("statement")


def some_ids(count, seed=0):
    return random.Random(seed).choices(range(97), k=count)


def continued(logits, ids, count):
    text = list(ids)
    for _ in range(count):
        text.append(int(logits(text)[-1].argmax()))
    return text[len(ids) :]


@pytest.mark.filterwarnings("ignore:transformers runs this model without")
@pytest.mark.parametrize("steps", [(45,), (7, 1, 30, 7)], ids=["whole", "in pieces"])
def test_logits_are_those_of_the_statement(chunked, run_on, steps):
    logits, folder = chunked
    ids = some_ids(sum(steps) + 9)
    runner = run_on(folder, "fake", page_size=4)
    assert runner.decision.request.kind == "dual_chunk"
    expected = logits(ids)
    state = SequenceState(token_ids=ids[: sum(steps)])
    for new in steps:
        found = runner.extend([state], [new])
    torch.testing.assert_close(found[0].double(), expected[sum(steps) - 1], atol=2e-4, rtol=2e-4)
    for place in range(sum(steps), len(ids)):
        state.token_ids.append(ids[place])
        found = runner.decode([state])
        torch.testing.assert_close(found[0].double(), expected[place], atol=2e-4, rtol=2e-4)


@pytest.mark.filterwarnings("ignore:transformers runs this model without")
def test_the_engine_s_texts_are_those_of_the_statement(chunked, run_on):
    logits, folder = chunked
    prompts = [some_ids(count, seed=count) for count in (3, 8, 17, 40)]
    prompts.append([*prompts[-1][:25], 1, 2, 3])
    expected = [continued(logits, ids, 12) for ids in prompts]
    runner = run_on(folder, "fake", page_size=4)
    for options in ({}, {"prefill_tokens": 5}):
        asked = [Prompt(token_ids=ids, max_new_tokens=12) for ids in prompts]
        texts = [
            list(each.token_ids) for each in run_prompts(Engine(runner, **options), asked).results
        ]
        assert texts == expected


def test_a_user_is_told_that_transformers_differs(chunked, run_on):
    with pytest.warns(UserWarning, match="without its dual chunks: beyond the first chunk of 8"):
        run_on(chunked[1], "fake")


def test_within_the_first_chunk_any_backend_serves_it(chunked, run_on):
    logits, folder = chunked
    runner = run_on(folder, "torch_native", max_context_len=C)
    assert runner.decision.request.kind == "mha"
    ids = some_ids(C)
    found = runner.extend([SequenceState(token_ids=ids)])
    torch.testing.assert_close(found[0].double(), logits(ids)[-1], atol=2e-4, rtol=2e-4)
    with pytest.raises(NoBackend, match="dual_chunk"):
        run_on(folder, "torch_native", max_context_len=C + 1)


def test_it_is_not_compiled(chunked, run_on):
    with pytest.raises(InvalidInput, match="no compile"):
        run_on(chunked[1], "fake", compile=True)


@pytest.mark.parametrize(
    "given", [{"chunk_size": 8}, {"chunk_size": 8, "local_size": 8}, {"chunk_size": "x"}]
)
def test_sizes_that_are_no_chunk(chunked, tmp_path, given):
    folder = shutil.copytree(chunked[1], tmp_path / "bad")
    config = json.loads((folder / "config.json").read_text())
    config["dual_chunk_attention_config"] = given
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidInput, match="dual_chunk_attention_config"):
        DualChunks.of(open_checkpoint(folder).config, 64)


def test_select_names_it(chunked):
    result = CliRunner().invoke(
        verbs, ["select", "--model", str(chunked[1]), "--platform", "nvidia:sm90,cuda=12.8"]
    )
    assert "dual_chunk" in result.output


def test_the_cases_of_its_first_use_have_chunks():
    candidate = Candidate(card=fake_card(), platform=fake_platform())
    request = Request(
        kind="dual_chunk", num_q_heads=4, num_kv_heads=2, head_dim=16, dtype="float32"
    )
    cases = list(cases_in_shape(candidate, request, "decode", page_size=4, in_graph=False))
    assert len(cases) > 5
    assert {run_case(candidate, case).status for case in cases[:4]} == {"passed"}
