"""The checks of a batch's values, which run only where they are asked for."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest
import torch

from attnmux.core import ForwardBatch, InvalidInput, SpecInput, SWAKVPool
from attnmux.core.contract.debug import check_batch, check_picks
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
    ids=["mask", "items"],
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
@pytest.mark.turns(8)
def test_every_standard_case_is_a_valid_batch(case: Case) -> None:
    setup = make_setup(case, fake_platform(), "cpu")
    for lengths in case.steps:
        step = prepare_step(setup, lengths)
        for given in step.inputs:
            batch = replace(step.batch, topk_indices=given.topk_indices)
            check_batch(setup.context, batch)
            check_picks(batch)


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
    _, step = extending
    chosen = torch.full((step.batch.num_tokens, 2), -1, dtype=torch.int32)
    batch = replace(step.batch, topk_indices=chosen)
    check_picks(batch)
    chosen[token] = torch.tensor(picks)
    with pytest.raises(InvalidInput, match=f"topk_indices: {said}"):
        check_picks(batch)


def spoilt(rng, value):
    """A tensor or a number that was changed in one way."""
    if isinstance(value, int):
        return rng.choice([-1, 0, value + 1, value - 1, 2**31 - 1, 2**62])
    way = rng.choice(["meta", "dtype", "longer", "shorter", "matrix", "none", "value", "value"])
    if way == "none":
        return None
    if way == "meta":
        return value.to("meta")
    if way == "dtype":
        return value.to(rng.choice([torch.int64, torch.int32, torch.float32, torch.bool]))
    if way == "longer":
        return torch.cat([value, value])
    if way == "shorter":
        return value[:-1]
    if way == "matrix":
        return value.unsqueeze(0)
    value = value.clone()
    place = rng.randrange(max(value.numel(), 1))
    if value.numel():
        number = rng.choice([-1, -(2**31), 0, 1, 7, 2**31 - 1, int(value.flatten()[place]) + 1])
        value.view(-1)[place] = number
    return value


SPOILT = 400
STEPS = {
    "extend": (extend((3, 5), (0, 4)), {}),
    "decode": (decode(3, 5, 14), {}),
    "verify": (verify(4, 3, 5), {"spec_topk": 4}),
    "window": (extend((3, 9), (2, 4)), {"windows": (5, None), "window_pool": True}),
}


@pytest.mark.parametrize("name", STEPS)
def test_spoilt_batches_are_refused_before_the_pool_is_touched(name) -> None:
    """Whatever is wrong with a batch, it is a typed error or a batch that runs."""
    step, settings = STEPS[name]
    case = Case(name="debug", steps=(step,), page_size=4, **settings)
    setup = make_setup(case, fake_platform(), "cpu")
    prepared = prepare_step(setup, step, host_lens=True)
    backend = FakeBackend(replace(setup.context, debug=True))
    pool, given = setup.context.token_to_kv_pool, prepared.inputs[0]
    rng, refused = random.Random(name), 0
    names = [
        field.name
        for field in fields(prepared.batch)
        if isinstance(getattr(prepared.batch, field.name), int | torch.Tensor)
    ]

    def held():
        return [buffer.clone() for one in pool.layer_ids for buffer in pool.get_kv_buffer(one)]

    before = held()
    for _ in range(SPOILT // len(STEPS)):
        field = rng.choice(names)
        changed = {field: spoilt(rng, getattr(prepared.batch, field))}
        batch = replace(prepared.batch, **changed)
        for call in (
            lambda batch=batch: backend.init_forward_metadata(batch),
            lambda batch=batch: backend.forward(given.q, given.k, given.v, given.layer, batch),
        ):
            try:
                call()
            except InvalidInput:
                refused += 1
                assert all(
                    torch.equal(old.view(torch.uint8), new.view(torch.uint8))
                    for old, new in zip(before, held(), strict=True)
                )
        backend.init_forward_metadata(prepared.batch)
        before = held()
    assert refused > SPOILT // len(STEPS)


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        (
            "q",
            lambda given: {
                "q": given.q.to("meta"),
                "k": given.k.to("meta"),
                "v": given.v.to("meta"),
            },
        ),
        ("out", lambda given: {"out": given.q[:1, :1, :1].expand(given.q.shape)}),
        ("lse", lambda given: {"lse": torch.zeros(1, 1).expand(given.q.shape[:2])}),
    ],
)
def test_calls_that_no_backend_can_serve_are_refused(extending, argument, change) -> None:
    setup, step = extending
    backend, given = FakeBackend(replace(setup.context, debug=True)), step.inputs[0]
    backend.init_forward_metadata(step.batch)
    arguments = {"q": given.q, "k": given.k, "v": given.v, **change(given)}
    with pytest.raises(InvalidInput, match=f"{argument}: "):
        backend.forward(layer=given.layer, batch=step.batch, **arguments)


def test_new_tokens_are_written_where_the_request_table_says(extending) -> None:
    setup, step = extending
    with pytest.raises(InvalidInput, match=r"out_cache_loc: .*as in the request table"):
        check_batch(
            setup.context, replace(step.batch, out_cache_loc=step.batch.out_cache_loc.flip(0))
        )


def test_an_empty_batch_is_valid() -> None:
    case = Case(name="empty", steps=(decode(),))
    setup = make_setup(case, fake_platform(), "cpu")
    check_batch(setup.context, prepare_step(setup, case.steps[0]).batch)


JUNK = (None, [1, 2], "decode", 1.5, -7, True, (), object(), torch.zeros(3, 3), torch.tensor(1))


@pytest.mark.parametrize("field", [field.name for field in fields(ForwardBatch)])
@pytest.mark.parametrize(
    "step",
    [
        decode(3, 5),
        extend((3, 5), (0, 4)),
        verify(4, 3, 5),
        extend((0, 5), items=((2, 2),)),
    ],
    ids=["decode", "extend", "verify", "items"],
)
def test_a_field_of_another_type_is_refused_by_name(step, field) -> None:
    case = Case(name="debug", steps=(step,), spec_topk=4 if step.mode.is_target_verify() else None)
    setup = make_setup(case, fake_platform(), "cpu")
    batch = prepare_step(setup, step).batch
    backend = FakeBackend(replace(setup.context, debug=True))
    backend.init_forward_metadata(batch)
    records = {"spec_info": SpecInput(draft_token_num=4), "multi_item": batch.multi_item}
    spoilt = [{field: value} for value in JUNK]
    if records.get(field) is not None:
        spoilt += [
            {field: replace(records[field], **{inner.name: value})}
            for inner in fields(records[field])
            for value in JUNK
        ]
    refused = 0
    for changes in spoilt:
        try:
            backend.init_forward_metadata(replace(batch, **changes))
        except InvalidInput:
            refused += 1
    assert refused >= 4


@pytest.mark.parametrize("value", [[[1.0]], "q", 3, 1.5])
def test_a_call_of_other_types_is_refused_by_name(value) -> None:
    case = Case(name="debug", steps=(decode(3, 5),))
    setup = make_setup(case, fake_platform(), "cpu")
    step = prepare_step(setup, case.steps[0])
    backend = FakeBackend(replace(setup.context, debug=True))
    backend.init_forward_metadata(step.batch)
    layer = setup.context.layers[0]
    q = torch.zeros(2, layer.tp_q_head_num, layer.qk_head_dim)
    kv = torch.zeros(2, layer.tp_k_head_num, layer.qk_head_dim)
    given = {"q": q, "k": kv, "v": kv, "layer": layer}
    for name in given:
        with pytest.raises(InvalidInput, match=f"^{name}: expected one of type"):
            backend.forward(**{**given, name: value}, batch=step.batch)
    for name in ("out", "lse", "q_rope", "k_rope", "save_kv_cache"):
        with pytest.raises(InvalidInput, match=f"^{name}: expected one of type"):
            backend.forward(**given, batch=step.batch, **{name: value})
    with pytest.raises(InvalidInput, match=r"^batch: expected a ForwardBatch"):
        backend.forward(**given, batch=value)
