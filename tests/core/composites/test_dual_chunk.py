"""Kind "dual_chunk": the layer, the checks of a call, the reference by hand, faults that show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import ForwardBatch, InvalidInput, LayerSpec
from attnmux.testing import (
    Candidate,
    Case,
    Disagreement,
    FakeBackend,
    GraphFakeBackend,
    decode,
    extend,
    fake_card,
    fake_platform,
    graph_card,
    make_setup,
    prepare_step,
    reference,
    run_case,
    standard_cases,
)

CASES = {case.name: case for case in standard_cases((16,)) if case.kind == "dual_chunk"}
STEP = extend((0, 12), (3, 8))
CASE = Case(
    name="small", steps=(STEP,), kind="dual_chunk", dual_chunk_len=4, head_dim=16, v_head_dim=8
)


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": "dual_chunk", "dual_chunk_len": 0},
        {"kind": "dual_chunk", "dual_chunk_len": -1},
        {"kind": "mha", "dual_chunk_len": 4},
        {"kind": "mha", "dual_chunk_len": -4},
    ],
)
def test_a_layer_has_chunks_where_its_kind_does(changes) -> None:
    layer = make_setup(CASE, fake_platform(), "cpu").context.layers[0]
    with pytest.raises(InvalidInput) as refusal:
        replace(layer, **changes)
    assert refusal.value.argument == "dual_chunk_len"


def test_a_call_brings_three_queries() -> None:
    setup = make_setup(CASE, fake_platform(), "cpu")
    backend, step = FakeBackend(setup.context), prepare_step(setup, STEP)
    given = step.inputs[0]
    assert given.q.shape == (20, 8, 48)
    backend.init_forward_metadata(step.batch)
    with pytest.raises(InvalidInput, match=r"\(20, 8, 48\)"):
        backend.forward(given.q[..., :16], given.k, given.v, given.layer, step.batch)


def test_the_reference_by_hand() -> None:
    """Token by token and key by key, from what the paper says of the three queries."""
    setup = make_setup(CASE, fake_platform(), "cpu")
    step = prepare_step(setup, STEP)
    backend, given = FakeBackend(setup.context), step.inputs[0]
    backend.save_kv(given.k, given.v, given.layer, step.batch)
    context, layer = setup.context, given.layer
    table, pool = context.req_to_token_pool.req_to_token, context.token_to_kv_pool
    out, lse = reference.attention(given.q, layer, step.batch, table, pool)

    keys, values = (buffer.double() for buffer in pool.get_kv_buffer(layer.layer_id))
    token = 0
    for row, (cached, new) in zip(step.batch.req_pool_indices, ((0, 12), (3, 8)), strict=True):
        for i in range(cached, cached + new):
            intra, successive, inter = given.q[token].double().split(16, dim=-1)
            slots = table[row, : i + 1].long()
            logits = torch.empty(8, i + 1, dtype=torch.float64)
            for j, slot in enumerate(slots):
                chunks = i // 4 - j // 4
                q = intra if chunks == 0 else successive if chunks == 1 else inter
                logits[:, j] = (q * keys[slot].repeat_interleave(4, 0)).sum(-1) * layer.scaling
            of_heads = values[slots].repeat_interleave(4, 1)
            expected = torch.einsum("hs,shd->hd", logits.softmax(-1), of_heads)
            torch.testing.assert_close(out[token], expected)
            torch.testing.assert_close(lse[token], logits.logsumexp(-1))
            token += 1


def test_in_the_first_chunk_it_is_plain_attention() -> None:
    case = replace(CASE, dual_chunk_len=64)
    setup = make_setup(case, fake_platform(), "cpu")
    step = prepare_step(setup, STEP)
    backend, given = FakeBackend(setup.context), step.inputs[0]
    backend.save_kv(given.k, given.v, given.layer, step.batch)
    places = setup.context.req_to_token_pool.req_to_token, setup.context.token_to_kv_pool
    plain = replace(given.layer, kind="mha", dual_chunk_len=0)
    out, _ = reference.attention(given.q, given.layer, step.batch, *places)
    expected, _ = reference.attention(given.q[..., :16], plain, step.batch, *places)
    torch.testing.assert_close(out, expected)


class SuccessiveAndInterSwapped(FakeBackend):
    def meets(self, layer, positions, num_keys):
        return torch.tensor([0, 2, 1])[super().meets(layer, positions, num_keys)]


class FirstQueryAlone(FakeBackend):
    def meets(self, layer, positions, num_keys):
        return torch.zeros_like(super().meets(layer, positions, num_keys))


class ChunkOneTooLong(FakeBackend):
    def meets(self, layer, positions, num_keys):
        return super().meets(
            replace(layer, dual_chunk_len=layer.dual_chunk_len + 1), positions, num_keys
        )


class ChunksCountedFromTheStep(FakeBackend):
    """Chunks of the new tokens, as if there were no prefix."""

    def meets(self, layer, positions, num_keys):
        return super().meets(layer, positions - positions[:1], num_keys)


class QueriesInTheNextChunk(FakeBackend):
    """A token's place taken for the number of keys, which is one more."""

    def meets(self, layer, positions, num_keys):
        return super().meets(layer, positions + 1, num_keys)


class ChunkBeforeLeftOut(FakeBackend):
    def visible(self, layer: LayerSpec, batch: ForwardBatch, *args: object) -> torch.Tensor:
        return super().visible(
            replace(layer, attention_chunk_size=layer.dual_chunk_len), batch, *args
        )


CAUGHT_BY: dict[type[FakeBackend], tuple[str, ...]] = {
    SuccessiveAndInterSwapped: ("decode", "extend-across-chunks", "mixed", "extend-prefix"),
    FirstQueryAlone: ("decode", "extend-chunk-boundaries", "extend-unsaved"),
    ChunkOneTooLong: ("decode-chunk-boundaries", "extend-chunk-boundaries", "extend-across-chunks"),
    ChunksCountedFromTheStep: ("decode", "extend-prefix", "extend-shared-prefix"),
    QueriesInTheNextChunk: ("decode-chunk-boundaries", "extend-chunk-boundaries"),
    ChunkBeforeLeftOut: ("decode", "extend-across-chunks", "extend-then-decode"),
}


@pytest.mark.parametrize(
    ("fault", "name"),
    [(fault, name) for fault, names in CAUGHT_BY.items() for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_fault_shows(fault: type[FakeBackend], name: str) -> None:
    case = CASES[f"dual-chunk-{name}-page16"]
    outcome = run_case(Candidate(card=fake_card(), platform=fake_platform(), factory=fault), case)
    assert outcome.status == "failed"
    assert isinstance(outcome.error, Disagreement), outcome.message


class ChunksOfTheCapture(GraphFakeBackend):
    """The lengths on the host when it was captured."""

    def meets(self, layer, positions, num_keys):
        return super().meets(layer, torch.tensor(positions.tolist()), num_keys)


def test_chunks_of_the_capture_show() -> None:
    case = replace(CASES["dual-chunk-decode-page16"], graph=True)
    broken = Candidate(card=graph_card(), platform=fake_platform(), factory=ChunksOfTheCapture)
    whole = Candidate(card=graph_card(), platform=fake_platform())
    assert run_case(whole, case).status == "passed"
    assert run_case(broken, case).status == "failed"


def test_a_step_of_every_chunk_is_decoded() -> None:
    """The cases reach what they are for: sequences that end in the first, second and third chunk,
    and later."""
    case = CASES["dual-chunk-decode-page16"]
    assert case.steps[0].mode is decode().mode
    ends = {(length - 1) // case.dual_chunk_len for length in case.steps[0].lens}
    assert ends == {0, 1, 2, 3}
