"""The checks of a batch's values, which run only where they are asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core.debug import check_batch
from attnmux.core.errors import InvalidInput
from attnmux.core.kv import SWAKVPool
from attnmux.testing import (
    Case,
    FakeBackend,
    decode,
    extend,
    fake_platform,
    make_setup,
    prepare_step,
    standard_cases,
    verify,
)


@pytest.fixture
def extending():
    case = Case(name="debug", steps=(extend((3, 5), (0, 4)),), page_size=4)
    setup = make_setup(case, fake_platform(), "cpu")
    return setup, prepare_step(setup, case.steps[0])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("req_pool_indices", torch.tensor([1, 99])),
        ("req_pool_indices", torch.tensor([1, -1])),
        ("out_cache_loc", torch.full((9,), 10_000)),
        ("out_cache_loc", torch.full((9,), -1)),
        ("seq_lens", torch.tensor([8, 1000], dtype=torch.int32)),
        ("seq_lens", torch.tensor([8, -1], dtype=torch.int32)),
        ("seq_lens", torch.tensor([8, 5], dtype=torch.int32)),
        ("encoder_out_cache_loc", torch.tensor([10_000])),
        ("seq_lens_cpu", torch.tensor([8, 5], dtype=torch.int32)),
        ("extend_seq_lens_cpu", torch.tensor([5, 3], dtype=torch.int32)),
        ("encoder_lens", torch.tensor([0, 1000], dtype=torch.int32)),
        ("extend_seq_lens", torch.tensor([5, 5], dtype=torch.int32)),
        ("extend_seq_lens", None),
    ],
)
def test_names_the_field_that_is_out_of_range(extending, field, value) -> None:
    setup, step = extending
    check_batch(setup.context, step.batch)
    with pytest.raises(InvalidInput) as caught:
        check_batch(setup.context, replace(step.batch, **{field: value}))
    assert caught.value.argument == field


def test_refuses_a_negative_prefix(extending) -> None:
    setup, step = extending
    prefix = torch.tensor([3, -4], dtype=torch.int32)
    seq_lens = torch.tensor([8, 0], dtype=torch.int32)
    batch = replace(step.batch, extend_prefix_lens=prefix, seq_lens=seq_lens)
    with pytest.raises(InvalidInput, match="extend_prefix_lens"):
        check_batch(setup.context, batch)


@pytest.mark.parametrize(
    ("step", "settings", "changed", "field"),
    [
        (decode(3, 5), {}, lambda b: {"out_cache_loc": b.out_cache_loc[:1]}, "out_cache_loc"),
        (
            verify(4, 3, 5),
            {"spec_topk": 4},
            lambda b: {"spec_info": replace(b.spec_info, custom_mask=b.spec_info.custom_mask[1:])},
            "spec_info.custom_mask",
        ),
        (
            extend((0, 5), items=((2, 2),)),
            {},
            lambda b: {
                "multi_item": replace(
                    b.multi_item, token_pos_in_items=b.multi_item.token_pos_in_items[1:]
                )
            },
            "multi_item.token_pos_in_items",
        ),
    ],
    ids=["decode", "mask", "items"],
)
def test_refuses_counts_that_contradict_each_other(step, settings, changed, field) -> None:
    setup = make_setup(Case(name="debug", steps=(step,), **settings), fake_platform(), "cpu")
    batch = prepare_step(setup, step).batch
    check_batch(setup.context, batch)
    with pytest.raises(InvalidInput) as caught:
        check_batch(setup.context, replace(batch, **changed(batch)))
    assert caught.value.argument == field


def test_refuses_a_table_that_leads_outside_the_pool(extending) -> None:
    setup, step = extending
    row = int(step.batch.req_pool_indices[0])
    setup.context.req_to_token_pool.req_to_token[row, 0] = setup.context.token_to_kv_pool.num_slots
    with pytest.raises(InvalidInput, match="req_to_token"):
        check_batch(setup.context, step.batch)


def test_refuses_keys_in_the_reserved_page(extending) -> None:
    setup, step = extending
    row, length = int(step.batch.req_pool_indices[1]), int(step.batch.seq_lens[1])
    table = setup.context.req_to_token_pool.req_to_token
    table[row, length] = 3
    check_batch(setup.context, step.batch)
    table[row, length - 1] = 3
    with pytest.raises(InvalidInput, match="slot 3 at column 3 of request 1"):
        check_batch(setup.context, step.batch)
    check_batch(setup.context, replace(step.batch, req_pool_indices=torch.tensor([0, 0])))


def test_refuses_keys_that_the_window_pool_gave_up() -> None:
    case = Case(name="swa", steps=(decode(14),), page_size=4, windows=(5, None), window_pool=True)
    setup = make_setup(case, fake_platform(), "cpu")
    batch = prepare_step(setup, case.steps[0]).batch
    check_batch(setup.context, batch)
    slots = setup.context.req_to_token_pool.req_to_token[batch.req_pool_indices[0]].long()
    pool = setup.context.token_to_kv_pool
    assert isinstance(pool, SWAKVPool)
    pool.unpair(slots[[8]] // 4)
    with pytest.raises(InvalidInput, match="slot 0 at column 8"):
        check_batch(setup.context, batch)


def test_an_encoder_does_not_hide_a_negative_length() -> None:
    case = Case(name="cross", steps=(decode(4, encoder=(6,)),))
    setup = make_setup(case, fake_platform(), "cpu")
    batch = prepare_step(setup, case.steps[0]).batch
    with pytest.raises(InvalidInput, match="seq_lens"):
        check_batch(setup.context, replace(batch, seq_lens=torch.tensor([-1]).int()))


def test_forward_checks_only_in_debug(extending) -> None:
    setup, step = extending
    batch = replace(step.batch, seq_lens=step.batch.seq_lens + 1)
    given = step.inputs[0]
    quiet = FakeBackend(setup.context)
    quiet.init_forward_metadata(batch)
    quiet.forward(given.q, given.k, given.v, given.layer, batch)
    before = setup.context.token_to_kv_pool.get_key_buffer(1).view(torch.uint8).clone()
    checking = FakeBackend(replace(setup.context, debug=True))
    with pytest.raises(InvalidInput, match="seq_lens"):
        checking.forward(given.q + 1, given.k + 1, given.v, given.layer, batch)
    after = setup.context.token_to_kv_pool.get_key_buffer(1).view(torch.uint8)
    assert torch.equal(before, after)


@pytest.mark.parametrize("case", standard_cases((16,)), ids=lambda case: case.name)
def test_every_standard_case_is_a_valid_batch(case: Case) -> None:
    setup = make_setup(case, fake_platform(), "cpu")
    for lengths in case.steps:
        step = prepare_step(setup, lengths)
        for given in step.inputs:
            check_batch(setup.context, replace(step.batch, topk_indices=given.topk_indices))


@pytest.mark.parametrize(
    ("token", "picks", "said"),
    [
        (0, [4, 1], "expected -1, or up to 3, .*got key 4 for token 0"),
        (4, [7, -2], ".*got key -2 for token 4"),
        (5, [0, 1], "expected -1, or up to 0, .*got key 1 for token 5"),
        (1, [2, 2], "expected each key once.* got key 2 twice for token 1"),
    ],
)
def test_refuses_keys_that_no_indexer_picks(extending, token, picks, said) -> None:
    """Behind a token, of another request by mistake, or twice."""
    setup, step = extending
    chosen = torch.full((step.batch.num_tokens, 2), -1, dtype=torch.int32)
    batch = replace(step.batch, topk_indices=chosen)
    check_batch(setup.context, batch)
    chosen[token] = torch.tensor(picks)
    with pytest.raises(InvalidInput, match=f"topk_indices: {said}"):
        check_batch(setup.context, batch)


def test_an_empty_batch_is_valid() -> None:
    case = Case(name="empty", steps=(decode(),))
    setup = make_setup(case, fake_platform(), "cpu")
    check_batch(setup.context, prepare_step(setup, case.steps[0]).batch)
