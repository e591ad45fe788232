"""Attention chunks by virtual requests: the suite's answers, and the requests themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import ForwardMode, InvalidInput, SpecInput
from attnmux.core.composites.local_attention import (
    LocalAttnBackend,
    local_context,
    with_virtual_requests,
)
from attnmux.core.composites.virtual_requests import virtual_step
from attnmux.core.plugin import ANY, Pieces
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.testing import (
    Candidate,
    Case,
    GraphFakeBackend,
    decode,
    extend,
    fake_card,
    fake_platform,
    graph_card,
    make_setup,
    prepare_step,
    run_case,
    verify,
)
from attnmux.testing.cases.standard import in_graphs, standard_cases
from attnmux.testing.fakes.backend import FakeBackend

CASES = [
    case
    for case in standard_cases((1, 16))
    if case.attention_chunk and not case.spec_topk and not case.attention_chunk % case.page_size
]


def chunkless(base):
    """A backend that no layer with chunks reaches."""

    class Chunkless(base):
        def __init__(self, context, options=None):
            assert not any(layer.attention_chunk_size for layer in context.layers)
            super().__init__(context)

        def forward_extend(self, call, batch):
            assert not call.layer.attention_chunk_size
            return super().forward_extend(call, batch)

    return Chunkless


def candidate(base) -> Candidate:
    card = graph_card() if base is GraphFakeBackend else fake_card(kv_dtype=ANY)
    card = replace(card, virtual_requests=True)
    return Candidate(card=card, platform=fake_platform(), factory=chunkless(base))


@pytest.mark.parametrize("base", [FakeBackend, TorchNativeBackend])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.turns(4)
def test_virtual_requests_have_the_answers_of_chunks(case, base) -> None:
    outcome = run_case(candidate(base), case)
    assert outcome.status == "passed", outcome.message


# The fake unpacks 4-bit floats by a constant from the host
WIDE = tuple(case for case in CASES if case.kv_dtype != "fp4_e2m1")


@pytest.mark.parametrize("case", in_graphs(WIDE), ids=lambda case: case.name)
def test_decode_is_replayed_from_graphs(case) -> None:
    outcome = run_case(candidate(GraphFakeBackend), case)
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize(
    "wrong",
    [
        lambda table, engines, rows, start, lens: None,
        lambda table, engines, rows, start, lens: table[1 : len(rows) + 1].copy_(
            engines[rows, : table.shape[1]]
        ),
    ],
    ids=["table is not filled", "chunk 0 for all"],
)
def test_wrong_tables_are_caught(monkeypatch, wrong) -> None:
    monkeypatch.setattr("attnmux.core.composites.virtual_requests._fill", wrong)
    (case,) = [case for case in CASES if case.name == "extend-chunk-page16"]
    assert run_case(candidate(FakeBackend), case).status == "failed"


def setup_of(*steps, **settings):
    case = Case(name="chunks", steps=steps, attention_chunk=16, **settings)
    return make_setup(case, fake_platform(), "cpu")


@pytest.mark.parametrize("host_lens", [False, True])
def test_requests_are_cut_at_borders_of_chunks(host_lens) -> None:
    step = extend((10, 9), (0, 32), (16, 1), (5, 0), trailing=2)
    setup = setup_of(step)
    batch = prepare_step(setup, step, host_lens=host_lens).batch
    engines = setup.context.req_to_token_pool.req_to_token
    table = torch.full((20, 16), -1, dtype=torch.int32)
    made = virtual_step(batch, 16, table=table, engines=engines)
    new, prefix, lens = [6, 3, 16, 16, 1], [10, 0, 0, 0, 0], [16, 3, 16, 16, 1]
    assert made.extend_seq_lens.tolist()[:5] == new
    assert made.extend_prefix_lens.tolist()[:5] == prefix
    assert made.seq_lens.tolist()[:5] == lens
    assert made.out_cache_loc is batch.out_cache_loc
    assert not bool(made.seq_lens[5:].any())
    if host_lens:
        assert made.batch_size == 5
        assert made.extend_seq_lens_cpu.tolist() == new
        assert made.extend_prefix_lens_cpu.tolist() == prefix
        assert (made.seq_lens_cpu.tolist(), made.seq_lens_sum) == (lens, 52)
    rows = batch.req_pool_indices.tolist()
    for row, (request, first, length) in enumerate(
        [(0, 0, 16), (0, 16, 3), (1, 0, 16), (1, 16, 16), (2, 16, 1)], 1
    ):
        slots = engines[rows[request], first : first + length].tolist()
        assert table[row].tolist() == slots + [0] * (16 - length)


def test_a_decoding_request_has_the_last_chunk_alone() -> None:
    step = decode(1, 16, 17, 40, 0)
    setup = setup_of(step)
    batch = prepare_step(setup, step, host_lens=True).batch
    table = torch.zeros(9, 16, dtype=torch.int32)
    engines = setup.context.req_to_token_pool.req_to_token
    made = virtual_step(batch, 16, table=table, engines=engines)
    assert made.seq_lens.tolist() == made.seq_lens_cpu.tolist() == [1, 16, 1, 8, 0]
    assert made.req_pool_indices.tolist() == [1, 2, 3, 4, 5]


def test_what_virtual_requests_cannot_serve_is_refused() -> None:
    setup = setup_of(extend((0, 3)), page_size=32)
    with pytest.raises(InvalidInput, match=r"attention_chunk_size: .*multiple of 32"):
        local_context(setup.context, 16)
    step = verify(3, 9)
    setup = setup_of(step, spec_topk=1)
    backend = with_virtual_requests(FakeBackend, setup.context)
    assert isinstance(backend, LocalAttnBackend)
    with pytest.raises(InvalidInput, match="DECODE, EXTEND or MIXED"):
        backend.init_forward_metadata(prepare_step(setup, step).batch)
    step = extend((0, 3))
    setup = setup_of(step)
    backend = with_virtual_requests(FakeBackend, setup.context)
    batch = prepare_step(setup, step).batch
    masked = SpecInput(draft_token_num=3, custom_mask=torch.ones(9, dtype=torch.bool))
    with pytest.raises(InvalidInput, match="spec_info"):
        backend.init_forward_metadata(replace(batch, spec_info=masked))
    plain = make_setup(Case(name="plain", steps=(decode(3),)), fake_platform(), "cpu")
    assert isinstance(with_virtual_requests(FakeBackend, plain.context), FakeBackend)


def test_pieces_follow_from_shapes() -> None:
    step = extend((10, 9), (0, 32))
    batch = prepare_step(setup_of(step), step).batch
    pieces = Pieces.of(batch, 16)
    assert len(pieces.rows) == 2 * 2 + 41 // 16 + 1
    assert batch.forward_mode is ForwardMode.EXTEND
