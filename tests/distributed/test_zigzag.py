"""Steps that are cut into the parts of ranks, without any ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.core import ForwardMode, InvalidInput, MultiItem, SpecInput
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.distributed import ZigzagStep, split_context, zigzag_step
from attnmux.distributed.split_parts import ChunkRows, parts_of
from attnmux.parts import parts_request
from attnmux.testing import Case, decode, extend, fake_platform, make_setup, prepare_step

SMALL = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 8, "v_head_dim": 8, "dtype": "float32"}


def setup_of(step, **changes):
    longest = max(1, *step.lens)
    return make_setup(
        Case(name="split", steps=(step,), max_context_len=longest, **{**SMALL, **changes}),
        fake_platform(),
        "cpu",
    )


def parts_on(whole, size: int, **options) -> list[ZigzagStep]:
    return [zigzag_step(whole, rank=rank, size=size, **options) for rank in range(size)]


requests = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(
    requests=requests, size=st.integers(1, 5), at_once=st.integers(1, 4), most=st.integers(5, 99)
)
def test_every_token_sees_the_keys_before_it_once(requests, size, at_once, most) -> None:
    """Counted by places: each token's keys are all of its request's up to itself."""
    setup = setup_of(extend(*requests))
    whole = prepare_step(setup, setup.case.steps[0]).batch
    table = setup.context.req_to_token_pool
    steps = parts_on(whole, size)
    assert sorted(torch.cat([step.rows for step in steps]).tolist()) == list(
        range(whole.num_tokens)
    )
    for step in steps:
        assert torch.equal(step.order, steps[0].order)
        seen: list[list[int]] = [[] for _ in range(step.num_tokens)]
        positions = whole.positions[step.order]
        for part in parts_of(step, table, chunks_at_once=at_once, most_tokens=most):
            if part.keys is None:
                note_own(seen, part, step)
                continue
            if isinstance(part.keys, ChunkRows):
                places = positions[part.keys.rows]
            else:
                places = place_of(table, whole)[part.keys]
            assert 0 < len(places) <= most
            note(seen, part, places)
        for token, position in enumerate(step.positions.tolist()):
            assert sorted(seen[token]) == list(range(position + 1))


def place_of(table, whole) -> torch.Tensor:
    """By slot, the place of its token in its request."""
    slots = table.req_to_token[whole.req_pool_indices].long()
    places = torch.zeros(int(slots.max()) + 1, dtype=torch.int64)
    for row, length in zip(slots, whole.seq_lens.tolist(), strict=True):
        places[row[:length]] = torch.arange(length)
    return places


def note_own(seen, part, step) -> None:
    assert part.tokens == slice(0, step.num_tokens)
    lens = part.batch.extend_seq_lens
    for start, length in zip(lens.cumsum(0) - lens, lens, strict=True):
        for token in range(int(start), int(start + length)):
            seen[token] += step.positions[start : token + 1].tolist()


def note(seen, part, places) -> None:
    batch, token, key = part.batch, part.tokens.start, 0
    assert batch.num_tokens == part.tokens.stop - part.tokens.start
    for new, keys in zip(batch.extend_seq_lens.tolist(), batch.encoder_lens.tolist(), strict=True):
        for each in range(token, token + new):
            seen[each] += places[key : key + keys].tolist()
        token, key = token + new, key + keys
    assert key == len(places)


@settings(deadline=None, max_examples=10)
@given(requests=requests, size=st.integers(1, 4))
def test_a_part_is_a_batch_for_any_backend(requests, size) -> None:
    """Over a pool that holds all keys, a rank's tokens have the answers of the whole step."""
    setup = setup_of(extend(*requests), windows=(None, 5))
    step = prepare_step(setup, setup.case.steps[0])
    backend = TorchNativeBackend(replace(setup.context, debug=True, max_batch_size=99))
    backend.init_forward_metadata(step.batch)
    answers = [
        backend.forward(each.q, each.k, each.v, each.layer, step.batch) for each in step.inputs
    ]
    for part in parts_on(step.batch, size):
        backend.init_forward_metadata(part)
        for each, answer in zip(step.inputs, answers, strict=True):
            found = backend.forward(each.q[part.rows], None, None, each.layer, part)
            torch.testing.assert_close(found, answer[part.rows], rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=30)
@given(requests=requests, size=st.integers(1, 5))
def test_the_first_rank_has_the_last_tokens(requests, size) -> None:
    setup = setup_of(extend(*requests))
    whole = prepare_step(setup, setup.case.steps[0]).batch
    first, *others = parts_on(whole, size)
    ends = whole.extend_seq_lens.cumsum(0) - 1
    has_new = whole.extend_seq_lens > 0
    assert torch.equal(first.rows[first.last_tokens[has_new]], ends[has_new].long())
    assert not any(len(each.last_tokens) for each in others)


@pytest.mark.parametrize("new", [4096, 4099])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_work_is_even(new, size) -> None:
    setup = setup_of(extend((0, new)))
    steps = parts_on(prepare_step(setup, setup.case.steps[0]).batch, size)
    work = [int((step.positions + 1).sum()) for step in steps]
    assert max(work) / min(work) < 1.01
    assert max(step.num_tokens for step in steps) - min(step.num_tokens for step in steps) <= 2


def test_steps_that_cannot_be_split() -> None:
    setup = setup_of(extend((4, 9), (0, 3)))
    batch = prepare_step(setup, setup.case.steps[0]).batch
    lens = torch.zeros(2, dtype=torch.int32)
    for changes, match in (
        ({"forward_mode": ForwardMode.TARGET_VERIFY}, "got TARGET_VERIFY"),
        ({"spec_info": SpecInput(draft_token_num=1)}, "since the step has drafts"),
        ({"multi_item": MultiItem(prefix_lens=lens, token_pos_in_items=lens)}, "has items"),
        ({"encoder_lens": lens}, "has an encoder"),
        ({"topk_indices": torch.zeros(12, 1, dtype=torch.int32)}, "has picked keys"),
        ({"extend_seq_lens": None}, "extend_seq_lens: expected lengths"),
        ({"extend_prefix_lens": None}, "extend_prefix_lens: expected lengths"),
    ):
        with pytest.raises(InvalidInput, match=match):
            zigzag_step(replace(batch, **changes), rank=0, size=2)
    for rank, size, match in ((2, 2, "rank: expected 0 to 1"), (-1, 2, "rank"), (0, 0, "size")):
        with pytest.raises(InvalidInput, match=match):
            zigzag_step(batch, rank=rank, size=size)
    step = decode(5)
    batch = prepare_step(setup_of(step), step).batch
    with pytest.raises(InvalidInput, match="got DECODE"):
        zigzag_step(batch, rank=0, size=2)


def test_contexts_of_parts() -> None:
    step = extend((0, 4))
    windows = {"windows": (None, 4, None), "logit_cap": 2.0, "sinks": True}
    context = setup_of(step, **windows).context
    made = split_context(context)
    own, cross, other, other_cross = made.layers
    assert [each.layer_id for each in made.layers] == [6, 7, 8, 9]
    assert (own.logit_cap, other.logit_cap) == (2.0, 6.0)
    assert cross.is_cross_attention
    assert other_cross.is_cross_attention
    assert own.sinks is None
    assert made.request == parts_request(context.request)
    assert made.request.cross_attention
    assert made.request.sliding_window is None
    for changes, match in (
        ({"windows": (4,)}, "a layer without a window"),
        ({"alibi": True}, "attention chunks and biases"),
        ({"relative_reach": 4}, "attention chunks and biases"),
        ({"is_encoder": True, "save_kv_cache": False}, "causal self attention"),
    ):
        with pytest.raises(InvalidInput, match=match):
            split_context(setup_of(step, **changes).context)
