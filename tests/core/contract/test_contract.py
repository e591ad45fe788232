"""`AttentionBackend.forward`: what it refuses, what it dispatches, what it leaves alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from msgspec import structs

from attnmux.core import (
    AttentionBackend,
    AttnmuxError,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    GraphUnsupported,
    InvalidInput,
    LayerSpec,
)
from attnmux.core.composites.dispatch import HybridAttnBackend
from attnmux.testing import (
    Case,
    CaseSetup,
    FakeBackend,
    PreparedStep,
    decode,
    extend,
    fake_platform,
    make_setup,
    prepare_step,
    verify,
)
from attnmux.testing.setup.placement import buffers


def setup_of(*steps: object, **settings: object) -> CaseSetup:
    case = Case(name="contract", steps=steps, page_size=4, **settings)
    return make_setup(case, fake_platform(), "cpu", seed=3)


def mla_setup(*steps: object) -> CaseSetup:
    latent = {"kind": "mla", "num_kv_heads": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 8}
    return setup_of(*steps, **latent)


def prepared(setup: CaseSetup, index: int = 0) -> PreparedStep:
    return prepare_step(setup, setup.case.steps[index])


def arguments(step: PreparedStep, index: int = 0) -> dict[str, torch.Tensor | None]:
    given = step.inputs[index]
    named = {item.name: getattr(given, item.name) for item in fields(given)}
    del named["layer"], named["topk_indices"]  # which the batch brings
    return {**named, "out": None, "lse": None}


def call(backend: AttentionBackend, step: PreparedStep, index: int = 0, **changes: object):
    named = {**arguments(step, index), **changes}
    layer = named.pop("layer", step.inputs[index].layer)
    batch = named.pop("batch", step.batch)
    q, k, v = (named.pop(name) for name in ("q", "k", "v"))
    return backend.forward(q, k, v, layer, batch, **named)


def pool_bytes(setup: CaseSetup) -> list[torch.Tensor]:
    return [
        buffer.view(torch.uint8).clone()
        for layer in setup.context.layers
        for buffer in buffers(setup, layer.layer_id)
    ]


class Recording(FakeBackend):
    """A backend that notes which of its methods run."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.calls: list[str] = []

    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        self.calls.append("save_kv")
        super().save_kv(k, v, layer, batch, k_rope=k_rope)

    def forward_decode(self, call, batch) -> torch.Tensor:
        self.calls.append("forward_decode")
        return super().forward_decode(call, batch)

    def forward_extend(self, call, batch) -> torch.Tensor:
        self.calls.append("forward_extend")
        return super().forward_extend(call, batch)


def assert_refused(
    setup: CaseSetup, step: PreparedStep, argument: str, **changes: torch.Tensor | bool | None
) -> None:
    backend = Recording(setup.context)
    backend.init_forward_metadata(step.batch)
    before = pool_bytes(setup)
    with pytest.raises(InvalidInput) as caught:
        call(backend, step, **changes)
    assert caught.value.argument == argument
    assert backend.calls == []
    assert all(map(torch.equal, before, pool_bytes(setup)))


Change = Callable[[torch.Tensor], torch.Tensor | None]


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("q", lambda q: q[:, :-1]),
        ("q", lambda q: q[..., :-1]),
        ("q", lambda q: q[:-1]),
        ("q", lambda q: q.flatten(1)),
        ("q", lambda q: q.float()),
        ("k", lambda k: k[:, :1]),
        ("k", lambda k: k[:-1]),
        ("v", lambda v: v[..., :-1]),
        ("v", lambda v: None),
    ],
)
def test_refuses_a_wrong_tensor_before_touching_the_pool(argument: str, change: Change) -> None:
    setup = setup_of(extend((3, 5), (0, 4)))
    step = prepared(setup)
    wrong = change(arguments(step)[argument])
    assert_refused(setup, step, argument, **{argument: wrong})


@pytest.mark.parametrize(
    ("argument", "tensor"),
    [
        ("out", torch.zeros(5, 3, dtype=torch.bfloat16)),
        ("out", torch.zeros(5, 8, 128)),
        ("out", torch.zeros(5, 8, 128, dtype=torch.bfloat16, device="meta")),
        ("lse", torch.zeros(5, 3)),
        ("lse", torch.zeros(5, 8, dtype=torch.bfloat16)),
    ],
)
def test_refuses_an_output_that_does_not_fit(argument: str, tensor: torch.Tensor) -> None:
    setup = setup_of(extend((3, 5)))
    assert_refused(setup, prepared(setup), argument, **{argument: tensor})


@pytest.mark.parametrize("argument", ["k", "v"])
def test_refuses_a_tensor_elsewhere_before_touching_the_pool(argument: str) -> None:
    setup = setup_of(extend((3, 5)))
    step = prepared(setup)
    assert_refused(setup, step, argument, **{argument: arguments(step)[argument].to("meta")})


def test_refuses_what_the_call_would_ignore() -> None:
    setup = setup_of(extend((0, 5)))
    step = prepared(setup)
    assert_refused(setup, step, "v", k=None)
    assert_refused(setup, step, "k_rope", k_rope=step.inputs[0].k, save_kv_cache=False)
    setup = mla_setup(decode(3, 5))
    step = prepared(setup)
    assert_refused(setup, step, "v", v=step.inputs[0].k)
    assert_refused(setup, step, "k_rope", k=None)
    assert_refused(setup, step, "q_rope", q_rope=step.inputs[0].q_rope.float())


def test_refuses_a_rotary_part_without_mla_and_its_absence_with_it() -> None:
    setup = setup_of(decode(3))
    step = prepared(setup)
    assert_refused(setup, step, "q_rope", q_rope=step.inputs[0].q)
    setup = mla_setup(decode(3, 5))
    assert_refused(setup, prepared(setup), "q_rope", q_rope=None)
    assert_refused(setup, prepared(setup), "k_rope", k_rope=None)


def test_an_error_names_the_value_and_the_expectation() -> None:
    setup = setup_of(decode(3, 2))
    step = prepared(setup)
    with pytest.raises(
        ValueError, match=r"k: expected shape \(2, 2, 128\), got shape \(1, 2, 128\)"
    ):
        call(FakeBackend(setup.context), step, k=step.inputs[0].k[:1])


@pytest.mark.parametrize(
    ("step", "method"),
    [
        (decode(3, 5), "forward_decode"),
        (extend((3, 5)), "forward_extend"),
        (extend((3, 5), (7, 1), mode=ForwardMode.MIXED), "forward_extend"),
        (verify(3, 5, 2), "forward_extend"),
        (extend((3, 2), mode=ForwardMode.DRAFT_EXTEND), "forward_extend"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.mode.name,
)
def test_saves_and_dispatches_by_mode(step: object, method: str) -> None:
    setup = setup_of(step, spec_topk=1)
    ready = prepared(setup)
    backend = Recording(setup.context)
    backend.init_forward_metadata(ready.batch)
    call(backend, ready)
    assert backend.calls == ["save_kv", method]


def test_writes_nothing_where_k_is_none_or_not_to_be_saved() -> None:
    setup = setup_of(extend((0, 5)), kv_in_pool=True)
    step = prepared(setup)
    backend = Recording(setup.context)
    backend.init_forward_metadata(step.batch)
    before = pool_bytes(setup)
    from_pool = call(backend, step)
    assert step.inputs[0].k is None
    k, v = (buffer[step.batch.out_cache_loc] for buffer in buffers(setup, 1))
    given = call(backend, step, k=k, v=v, save_kv_cache=False)
    assert backend.calls == ["forward_extend", "forward_extend"]
    assert all(map(torch.equal, before, pool_bytes(setup)))
    torch.testing.assert_close(from_pool, given)


def test_idle_is_empty_and_touches_nothing() -> None:
    setup = setup_of(extend((0, 5)), extend(mode=ForwardMode.IDLE))
    backend = Recording(setup.context)
    step = prepared(setup, 1)
    before = pool_bytes(setup)
    result = call(backend, step)
    assert result.shape == (0, 8, 128)
    assert result.dtype == torch.bfloat16
    assert backend.calls == []
    assert all(map(torch.equal, before, pool_bytes(setup)))


def test_idle_rows_are_zero() -> None:
    """A rank with nothing to do may carry padding rows through the model."""
    setup = setup_of(decode(3, 4))
    step = prepared(setup)
    idle = replace(step.batch, forward_mode=ForwardMode.IDLE)
    backend = Recording(setup.context)
    assert not call(backend, step, batch=idle).any()
    out = torch.full((2, 8, 128), torch.nan, dtype=torch.bfloat16)
    lse = torch.full((2, 8), torch.nan)
    assert call(backend, step, batch=idle, out=out, lse=lse) is out
    assert not out.any()
    assert bool((lse == -torch.inf).all())
    assert backend.calls == []


def test_out_is_returned_even_where_a_backend_returns_its_own_tensor() -> None:
    class OwnTensor(FakeBackend):
        def forward_decode(self, call, batch) -> torch.Tensor:
            return super().forward_decode(structs.replace(call, out=None), batch)

    setup = setup_of(decode(3, 9))
    step = prepared(setup)
    backend = OwnTensor(setup.context)
    backend.init_forward_metadata(step.batch)
    out = torch.full((2, 8, 128), torch.nan, dtype=torch.bfloat16)
    assert call(backend, step, out=out) is out
    assert bool(out.isfinite().all())


def test_cross_attention_writes_to_the_encoder_slots() -> None:
    setup = setup_of(extend((0, 3), encoder=(6,)))
    step = prepared(setup)
    backend = FakeBackend(setup.context)
    backend.init_forward_metadata(step.batch)
    crossing = step.inputs[-1]
    assert crossing.layer.is_cross_attention
    call(backend, step, index=-1)
    written = buffers(setup, crossing.layer.layer_id)[0][step.batch.encoder_out_cache_loc]
    assert torch.equal(written, crossing.k)


def test_cross_attention_without_encoder_slots_is_refused() -> None:
    setup = setup_of(extend((0, 3), encoder=(6,)))
    step = prepared(setup)
    backend = FakeBackend(setup.context)
    before = pool_bytes(setup)
    with pytest.raises(InvalidInput, match="encoder_out_cache_loc"):
        call(backend, step, index=-1, batch=replace(step.batch, encoder_out_cache_loc=None))
    assert all(map(torch.equal, before, pool_bytes(setup)))


def test_init_forward_metadata_runs_both_halves_in_order() -> None:
    class Halves(FakeBackend):
        def init_forward_metadata_out_graph(self, batch, in_capture=False) -> None:
            seen.append(("out", in_capture))

        def init_forward_metadata_in_graph(self, batch) -> None:
            seen.append(("in", False))

    seen: list[tuple[str, bool]] = []
    setup = setup_of(decode(3))
    Halves(setup.context).init_forward_metadata(prepared(setup).batch)
    assert seen == [("out", False), ("in", False)]


def test_graphs_are_refused_unless_a_backend_says_otherwise() -> None:
    backend = FakeBackend(setup_of(decode(3)).context)
    with pytest.raises(GraphUnsupported, match="FakeBackend"):
        backend.init_cuda_graph_state(8, 8)
    assert backend.get_cuda_graph_seq_len_fill_value() == 1


def test_context_knows_its_layers_by_id() -> None:
    context = setup_of(decode(3)).context
    first, second = context.layers
    assert context.layer(second.layer_id) is second
    with pytest.raises(InvalidInput, match=r"layer_id: expected one of \[1, 3\], got 2"):
        context.layer(2)
    with pytest.raises(InvalidInput, match="a different id for each"):
        replace(context, layers=(first, replace(second, layer_id=first.layer_id)))


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_q_head_num": 6, "tp_k_head_num": 4},
        {"tp_k_head_num": 0},
        {"tp_v_head_num": 1},
        *({"scaling": value} for value in (0.0, -1.0, math.nan, math.inf, None, "1")),
        *({"k_scale": value} for value in (0.0, -1.0, math.nan, math.inf, "1")),
        *({"v_scale": value} for value in (0.0, -1.0, math.nan, math.inf)),
        *({"logit_cap": value} for value in (-1.0, math.nan, math.inf, None)),
        *({"sliding_window_size": value} for value in (-2, 1.5, None)),
        *({"attention_chunk_size": value} for value in (-1, None)),
        {"sinks": torch.zeros(2)},
        {"sinks": torch.zeros(8, dtype=torch.bfloat16)},
        {"alibi_slopes": torch.zeros(2)},
        {"alibi_slopes": torch.zeros(8, dtype=torch.float64)},
        {"relative_bias": torch.zeros(8)},
        {"relative_bias": torch.zeros(2, 9)},
        {"relative_bias": torch.zeros(8, 0)},
        {"relative_bias": torch.zeros(8, 9, dtype=torch.bfloat16)},
        {"relative_bias": torch.zeros(8, 4), "is_causal": False},
        {"relative_bias": torch.zeros(8, 9), "alibi_slopes": torch.zeros(8)},
        {"kind": "mla", "v_head_dim": 64},
        {"kind": "mla", "tp_k_head_num": 1, "tp_v_head_num": 1, "v_head_dim": 128},
    ],
)
def test_a_layer_that_cannot_be_is_refused(changes: dict[str, object]) -> None:
    layer: LayerSpec = setup_of(decode(3)).context.layers[0]
    with pytest.raises(InvalidInput):
        replace(layer, **changes)


def test_the_ends_of_a_layers_ranges_are_taken() -> None:
    layer: LayerSpec = setup_of(decode(3)).context.layers[0]
    smallest = {"scaling": 1e-30, "k_scale": 1e-30, "v_scale": 1e-30, "logit_cap": 1e-30}
    assert replace(layer, **smallest).features == {"logit_cap"}
    assert replace(layer, sliding_window_size=0).features == {"sliding_window"}
    assert not replace(layer, sliding_window_size=-1, logit_cap=0.0, k_scale=None).features


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"logit_cap": 30.0}, "logit_cap"),
        ({"is_cross_attention": True}, "cross_attention"),
        ({"is_causal": False}, "bidirectional"),
        ({"kind": "dual_chunk", "dual_chunk_len": 16}, "kind dual_chunk"),
        ({"kind": "mla", "tp_k_head_num": 1, "tp_v_head_num": 1, "v_head_dim": 64}, "kind mla"),
    ],
)
def test_slopes_that_no_layer_can_have(changes: dict[str, object], named: str) -> None:
    layer: LayerSpec = setup_of(decode(3)).context.layers[0]
    biased = replace(layer, alibi_slopes=torch.ones(8))
    assert biased.alibi_slopes is not None
    with pytest.raises(InvalidInput, match=f"alibi_slopes: .*{named}"):
        replace(biased, **changes)
    if "is_causal" not in changes:
        with pytest.raises(InvalidInput, match=f"relative_bias: .*{named}"):
            replace(layer, relative_bias=torch.ones(8, 9), **changes)


@pytest.mark.parametrize(("is_causal", "columns"), [(True, 13), (False, 25), (True, 1), (False, 1)])
def test_the_reach_of_a_table_of_biases(is_causal: bool, columns: int) -> None:
    layer: LayerSpec = setup_of(decode(3)).context.layers[0]
    assert layer.relative_reach == 0
    biased = replace(layer, is_causal=is_causal, relative_bias=torch.ones(8, columns))
    assert biased.relative_reach == (0 if columns == 1 else 12)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("req_pool_indices", lambda values: values.int()),
        ("seq_lens", lambda values: values.long()),
        ("seq_lens", lambda values: values[:1]),
        ("out_cache_loc", lambda values: values.int()),
        ("out_cache_loc", lambda values: values[:-1]),
        ("extend_seq_lens", lambda values: values.long()),
        ("extend_prefix_lens", lambda values: values.unsqueeze(1)),
        ("seq_lens_cpu", lambda values: values.to("meta")),
        ("encoder_lens", lambda values: torch.zeros(3, dtype=torch.int32)),
        ("encoder_out_cache_loc", lambda values: torch.zeros(3, dtype=torch.int32)),
        ("positions", lambda values: values.int()),
        ("positions", lambda values: values[:-1]),
        ("topk_indices", lambda values: torch.zeros(9, 4)),
        ("topk_indices", lambda values: torch.zeros(8, 4, dtype=torch.int32)),
        ("topk_indices", lambda values: torch.zeros(9, dtype=torch.int32)),
    ],
)
def test_a_step_with_a_malformed_field_is_refused(field: str, change: Change) -> None:
    setup = setup_of(extend((3, 5), (0, 4)))
    batch = prepare_step(setup, setup.case.steps[0], host_lens=True).batch
    backend = FakeBackend(setup.context)
    with pytest.raises(InvalidInput) as caught:
        backend.init_forward_metadata(replace(batch, **{field: change(getattr(batch, field))}))
    assert caught.value.argument == field


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("slots", [1, 3, 4])
def test_a_decode_step_has_one_slot_a_request(slots: int, debug: bool) -> None:
    setup = setup_of(decode(3, 5))
    batch = prepare_step(setup, setup.case.steps[0]).batch
    backend = FakeBackend(replace(setup.context, debug=debug))
    of_tokens = {
        name: torch.ones(slots, dtype=torch.int64) for name in ("out_cache_loc", "positions")
    }
    with pytest.raises(InvalidInput, match=f"out_cache_loc: expected 2, .* got {slots} slots"):
        backend.init_forward_metadata(replace(batch, **of_tokens))


@pytest.mark.parametrize("mode", ForwardMode)
def test_a_mode_is_decode_idle_or_extend(mode: ForwardMode) -> None:
    idle = mode is ForwardMode.IDLE
    assert [mode.is_decode(), idle, mode.is_extend()].count(True) == 1
    assert mode.is_decode_or_idle() == (not mode.is_extend())


def test_num_tokens_counts_rows_of_q() -> None:
    setup = setup_of(extend((3, 5), (0, 4), trailing=2), decode(3, 4, padding=2))
    assert prepared(setup, 0).batch.num_tokens == 11
    decoding: ForwardBatch = prepared(setup, 1).batch
    assert decoding.num_tokens == 4
    assert replace(decoding, extend_num_tokens=99).num_tokens == 4


class WithoutLSE(FakeBackend):
    def check_lse(self, layer: LayerSpec, batch: ForwardBatch) -> None:
        raise InvalidInput("lse", got="a tensor", expected="None")


def composite_of(backend: AttentionBackend) -> AttentionBackend:
    return HybridAttnBackend(prefill=FakeBackend(backend.context), decode=backend)


@pytest.mark.parametrize("wrap", [lambda backend: backend, composite_of])
def test_an_lse_that_is_not_offered_is_refused_before_the_pool_is_written(wrap) -> None:
    setup = setup_of(decode(3, 4), extend((0, 5)))
    step, lse = prepare_step(setup, setup.case.steps[0]), torch.zeros(2, 8)
    backend = wrap(WithoutLSE(setup.context))
    backend.init_forward_metadata(step.batch)
    before = pool_bytes(setup)
    with pytest.raises(InvalidInput, match="lse: expected None"):
        call(backend, step, lse=lse)
    assert all(map(torch.equal, before, pool_bytes(setup)))
    assert call(backend, step).shape == (2, 8, 128)


class Returning(FakeBackend):
    """Returns something else than the result."""

    change: Callable[[torch.Tensor], object]

    def forward_extend(self, call, batch):
        return self.change(super().forward_extend(call, batch).clone())

    forward_decode = forward_extend


@pytest.mark.parametrize("given_out", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda result: None,
        lambda result: (result, None),
        lambda result: result.tolist(),
        lambda result: result[:1],
        lambda result: result[:, :1],
        lambda result: result[..., :1],
        lambda result: result[0],
        lambda result: result.flatten(1),
        lambda result: result.unsqueeze(0),
        lambda result: result.sum(),
        lambda result: torch.cat([result, result]),
        lambda result: result.double(),
        lambda result: result.to(torch.complex64),
        lambda result: result.to("meta"),
    ],
)
def test_a_wrong_result_is_the_backend_s_fault(change, given_out) -> None:
    setup = setup_of(extend((3, 5), (0, 4)))
    step, backend = prepared(setup), Returning(setup.context)
    backend.change = change
    backend.init_forward_metadata(step.batch)
    out = torch.zeros_like(step.inputs[0].q) if given_out else None
    with pytest.raises(
        AttnmuxError, match=r"Returning returned .*expected torch.bfloat16 of shape"
    ):
        call(backend, step, out=out)
