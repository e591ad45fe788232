"""Several sequences in one row, by `position_ids` or `cu_seq_lens`, as data collators pack them."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from attnmux.core import InvalidInput
from attnmux.transformers import IMPLEMENTATION
from attnmux.transformers.load.checkpoint import quiet_transformers

LENS = (13, 1, 9, 4)
BOUNDS = torch.tensor([0, 13, 14, 23, 27], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(length) for length in LENS])[None]


@pytest.fixture
def on_attnmux(tiny):
    def load(name):
        with quiet_transformers(progress=False):
            return AutoModelForCausalLM.from_pretrained(
                tiny(name)[1], attn_implementation=IMPLEMENTATION
            ).eval()

    return load


@pytest.fixture
def ids():
    return torch.randint(1, 97, (1, sum(LENS)), generator=torch.Generator().manual_seed(2))


def logits(model, input_ids, **given):
    with torch.inference_mode():
        return model(input_ids=input_ids, use_cache=False, **given).logits


def alone(model, ids):
    """Each sequence by itself."""
    return torch.cat([logits(model, part) for part in ids.split(LENS, dim=1)], dim=1)


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "architecture",
    ["llama", "mistral", "gemma2", "gemma3", "gpt-oss", "deepseek-v3", "gpt2"],
)
def test_packed_sequences_do_not_see_each_other(tiny, on_attnmux, ids, architecture):
    model = on_attnmux(architecture)
    expected = alone(tiny(architecture)[0], ids)
    if architecture != "gpt-oss":  # its class makes a mask without the positions
        assert_same(logits(tiny(architecture)[0], ids, position_ids=POSITIONS), expected)
        assert_same(logits(model, ids, position_ids=POSITIONS), expected)
    bounds = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS}
    longest = {"max_length_q": max(LENS), "max_length_k": max(LENS)}
    assert_same(logits(model, ids, position_ids=POSITIONS, **bounds, **longest), expected)


def test_bounds_alone_pack_too(tiny, on_attnmux, ids):
    """Positions go on from sequence to sequence, and rotations know only distances."""
    expected = alone(tiny("llama")[0], ids)
    assert_same(logits(on_attnmux("llama"), ids, cu_seq_lens_q=BOUNDS), expected)


def test_each_row_is_packed_in_its_own_way(tiny, on_attnmux, ids):
    rows = torch.cat([ids, ids.flip(1)])
    other = torch.cat([torch.arange(20), torch.arange(7)])[None]
    positions = torch.cat([POSITIONS, other])
    theirs = logits(tiny("gemma3")[0], rows, position_ids=positions)
    assert_same(logits(on_attnmux("gemma3"), rows, position_ids=positions), theirs)


@pytest.mark.parametrize(
    ("architecture", "given", "named"),
    [
        ("llama4", {"position_ids": POSITIONS}, "attention_mask"),
        ("llama", {"cu_seq_lens_q": BOUNDS[:-1]}, "cu_seq_lens"),
        ("llama", {"cu_seq_lens_q": torch.tensor([0, 13, 13, 27])}, "cu_seq_lens"),
        ("llama", {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS[[0, 2, 4]]}, "cu_seq_lens"),
        ("llama", {"position_ids": POSITIONS, "cu_seq_lens_q": BOUNDS[[0, 2, 4]]}, "cu_seq_lens"),
        (
            "llama",
            {"attention_mask": torch.tensor([[0] * 5 + [1] * 22]), "cu_seq_lens_q": BOUNDS},
            "cu_seq_lens",
        ),
    ],
    ids=["chunks", "too few", "an empty one", "other keys", "other positions", "padding"],
)
def test_what_cannot_be_packed(on_attnmux, ids, architecture, given, named):
    with pytest.raises(InvalidInput) as caught:
        logits(on_attnmux(architecture), ids, **given)
    assert caught.value.argument == named


def test_cached_tokens_before_packed_ones(on_attnmux, ids):
    model = on_attnmux("llama")
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache)
        with pytest.raises(InvalidInput, match="without a cache"):
            model(input_ids=ids, past_key_values=cache, cu_seq_lens_q=BOUNDS)
