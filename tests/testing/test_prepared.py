"""The worlds that cases run in: scattered pages, NaN wherever nobody may read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import ForwardMode
from attnmux.testing import (
    Case,
    decode,
    extend,
    fake_platform,
    make_setup,
    prepare_step,
    reference,
    standard_cases,
    verify,
)
from attnmux.testing.setup.batches import UNWRITTEN
from attnmux.testing.setup.placement import LEFT_OVER, buffers
from attnmux.testing.setup.prepared import kv_rows


def setup_of(*steps, page_size=4, **settings):
    case = Case(name="setup", steps=steps, page_size=page_size, **settings)
    return make_setup(case, fake_platform(), "cpu", seed=2)


def key_slots(setup, batch) -> list[torch.Tensor]:
    """Slots of each request's keys, by the contract's words."""
    table = setup.context.req_to_token_pool.req_to_token
    lens = batch.seq_lens
    if batch.forward_mode.is_target_verify():
        lens = lens + batch.extend_seq_lens
    return [
        table[row, :length].long() for row, length in zip(batch.req_pool_indices, lens, strict=True)
    ]


@pytest.mark.parametrize("page_size", [1, 4])
def test_only_cached_tokens_are_readable(page_size: int) -> None:
    setup = setup_of(extend((6, 3), (0, 5), (9, 1)), page_size=page_size)
    batch = prepare_step(setup, setup.case.steps[0]).batch
    of_requests = key_slots(setup, batch)
    prefixes = batch.extend_prefix_lens
    cached = torch.cat([s[:prefix] for s, prefix in zip(of_requests, prefixes, strict=True)])
    pages = torch.zeros(setup.context.token_to_kv_pool.num_slots // page_size, dtype=torch.bool)
    pages[torch.cat(of_requests) // page_size] = True
    owned = pages.repeat_interleave(page_size)
    left_over = owned.clone()
    left_over[cached] = False
    for layer in setup.context.layers:
        for buffer in buffers(setup, layer.layer_id):
            assert bool(buffer[~owned].isnan().all())
            assert bool((buffer[left_over] == LEFT_OVER).all())
            assert bool((buffer[cached].abs() < LEFT_OVER).all())


def test_pages_are_scattered_and_whole() -> None:
    setup = setup_of(extend((17, 3), (0, 21)))
    batch = prepare_step(setup, setup.case.steps[0]).batch
    for slots in key_slots(setup, batch):
        pages = slots[::4] // 4
        places = torch.arange(len(slots))
        assert torch.equal(slots, pages[places // 4] * 4 + places % 4)
        assert not bool((pages.diff() > 0).all())
        assert 0 not in pages


def test_table_entries_after_a_request_lead_to_nan() -> None:
    setup = setup_of(decode(6, 2))
    batch = prepare_step(setup, setup.case.steps[0]).batch
    table = setup.context.req_to_token_pool.req_to_token
    keys = setup.context.token_to_kv_pool.get_key_buffer(1)
    assert not table[0].any()
    for row, length in zip(batch.req_pool_indices, batch.seq_lens, strict=True):
        stale = table[row, length:].long()
        assert bool((stale > 0).all())
        assert bool(keys[stale].isnan().all())


def test_new_tokens_go_to_the_end_of_their_sequence() -> None:
    setup = setup_of(extend((6, 3), (0, 5)), verify(3, 4, 9), decode(7, 1), spec_topk=1)
    for index, new in enumerate(([3, 5], [3, 3], [1, 1])):
        batch = prepare_step(setup, setup.case.steps[index]).batch
        ends = [slots[-count:] for slots, count in zip(key_slots(setup, batch), new, strict=True)]
        assert torch.equal(batch.out_cache_loc, torch.cat(ends))
        last = [len(slots) for slots in key_slots(setup, batch)]
        positions = [torch.arange(n - count, n) for n, count in zip(last, new, strict=True)]
        assert torch.equal(batch.positions, torch.cat(positions))


def test_padding_reads_row_0_and_writes_slot_0() -> None:
    setup = setup_of(decode(6, 2, padding=2), extend((0, 5), padding=1, trailing=3))
    for step, (rows, real) in enumerate(((4, 2), (9, 5))):
        ready = prepare_step(setup, setup.case.steps[step])
        assert ready.batch.num_tokens == rows
        assert ready.num_real_tokens == real
        assert not ready.batch.out_cache_loc[real:].any()
        assert not ready.batch.req_pool_indices[len(setup.case.steps[step].lens) :].any()
        assert bool((setup.context.token_to_kv_pool.get_key_buffer(1)[:4] == LEFT_OVER).all())
    filled = prepare_step(setup, setup.case.steps[0], seq_len_fill=0)
    assert filled.batch.seq_lens.tolist() == [6, 2, 0, 0]


def test_a_shared_prefix_lies_in_shared_slots() -> None:
    setup = setup_of(extend((8, 3), (8, 1), shared_prefix=8))
    first, second = key_slots(setup, prepare_step(setup, setup.case.steps[0]).batch)
    assert torch.equal(first[:8], second[:8])
    assert not set(first[8:].tolist()) & set(second[8:].tolist())


def test_host_mirrors_come_when_asked_for() -> None:
    setup = setup_of(extend((6, 3), (0, 5)))
    without = prepare_step(setup, setup.case.steps[0]).batch
    assert without.seq_lens_cpu is None
    assert without.extend_seq_lens_cpu is None
    batch = prepare_step(setup, setup.case.steps[0], host_lens=True).batch
    assert torch.equal(batch.seq_lens_cpu, batch.seq_lens)
    assert torch.equal(batch.extend_seq_lens_cpu, batch.extend_seq_lens)
    assert torch.equal(batch.extend_prefix_lens_cpu, batch.extend_prefix_lens)
    assert batch.seq_lens_sum == 14


def test_encoder_tokens_are_written_once() -> None:
    setup = setup_of(extend((0, 3), (5, 2), encoder=(6, 9)), decode(4, 8, encoder=(6, 9)))
    extending = prepare_step(setup, setup.case.steps[0])
    crossing = extending.inputs[-1]
    assert crossing.layer.is_cross_attention
    assert len(crossing.k) == len(extending.batch.encoder_out_cache_loc) == 6
    decoding = prepare_step(setup, setup.case.steps[1])
    assert decoding.inputs[-1].k is None
    assert len(decoding.batch.encoder_out_cache_loc) == 0


def test_a_seed_makes_one_world() -> None:
    case = Case(name="seeded", steps=(decode(6, 2),), sinks=True)
    q, table, sinks = [], [], []
    for seed in (1, 1, 2):
        setup = make_setup(case, fake_platform(), "cpu", seed=seed)
        q.append(prepare_step(setup, case.steps[0]).inputs[0].q)
        table.append(setup.context.req_to_token_pool.req_to_token)
        sinks.append(setup.context.layers[0].sinks)
    for drawn in (q, table, sinks):
        assert torch.equal(drawn[0], drawn[1])
        assert not torch.equal(drawn[0], drawn[2])


def test_layers_have_windows_and_sinks_of_their_own() -> None:
    setup = setup_of(decode(6), windows=(8, None, 21), sinks=True)
    layers = setup.context.layers
    assert [layer.sliding_window_size for layer in layers] == [8, -1, 21]
    assert not torch.equal(layers[0].sinks, layers[1].sinks)
    assert setup.case.request.sliding_window == 8


@pytest.mark.parametrize("case", standard_cases((16,)), ids=lambda case: case.name)
@pytest.mark.turns(12)
def test_the_reference_is_finite_in_every_case(case: Case) -> None:
    """Whatever the contract lets a backend read holds numbers."""
    setup = make_setup(case, fake_platform(), "cpu")
    for lengths in case.steps:
        step = prepare_step(setup, lengths)
        for given in step.inputs:
            loc, rows = kv_rows(setup, given, step.batch)
            for buffer, new in zip(buffers(setup, given.layer.layer_id), rows, strict=False):
                # torch writes no single rows of 4-bit floats
                buffer.view(torch.uint8)[loc] = new.view(torch.uint8)
            unsaved = {} if case.save_kv_cache else {"k": given.k, "v": given.v}
            out, _ = reference.attention(
                given.q,
                given.layer,
                replace(step.batch, topk_indices=given.topk_indices),
                setup.context.req_to_token_pool.req_to_token,
                setup.context.token_to_kv_pool,
                q_rope=given.q_rope,
                **unsaved,
            )
            assert bool(out.isfinite().all())


def test_names_are_unique_and_say_the_page_size() -> None:
    cases = standard_cases((1, 32))
    assert len({case.name for case in cases}) == len(cases)
    assert all(case.name.endswith(f"-page{case.page_size}") for case in cases)


def test_every_mode_feature_and_successor_is_covered() -> None:
    cases = standard_cases((16,))
    assert {step.mode for case in cases for step in case.steps} == set(ForwardMode)
    asked = {name for case in cases for name in case.request.origins}
    features = {"sliding_window", "attention_chunk", "cross_attention", "sinks", "alibi"}
    features |= {
        "relative_bias",
        "logit_cap",
        "custom_mask",
        "multi_item",
        "lse",
        "spec_topk",
        "kv_lora_rank",
    }
    assert features <= asked
    for case in cases:
        assert case.steps[0] != case.steps[1], case.name


def test_picks_are_keys_up_to_each_token_and_leave_room() -> None:
    """Some tokens see fewer keys than there is room for; -1 lies behind the keys, or between."""
    sparse = {"kind": "nsa", "num_kv_heads": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    setup = setup_of(extend((9, 6), (0, 3), trailing=2), index_topk=8, **sparse)
    step = prepare_step(setup, setup.case.steps[0])
    assert step.batch.topk_indices.shape == (11, 8)
    assert int(step.batch.topk_indices.min()) >= UNWRITTEN
    places = [*range(9, 15), *range(3), -1, -1]
    for given in step.inputs:
        for token, place in enumerate(places):
            keys = [key for key in given.topk_indices[token].tolist() if key >= 0]
            room = min(place + 1, 8)
            assert len(set(keys)) == len(keys) == room - (token % 5 == 4 and room > 1)
            assert all(key <= place for key in keys)
    in_front, between = (given.topk_indices for given in step.inputs)
    assert not bool((in_front.diff(dim=1) > 0)[in_front[:, :-1] < 0].any())
    assert bool((between.diff(dim=1) > 0)[between[:, :-1] < 0].any())
