"""Linear layers: their description, states, calls, and hybrids with attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnmux.core import (
    AttnmuxError,
    ForwardMode,
    GraphUnsupported,
    InvalidInput,
    LayerSpec,
    LinearLayerSpec,
    NoBackend,
    Offer,
    Plugins,
    Policy,
    PoolExhausted,
    Request,
    SpecInput,
    build,
    solve,
)
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import GraphStep, LinearAttentionBackend, one_of
from attnmux.cpu.plugin import TORCH_LINEAR
from attnmux.cpu.torch_linear import TorchLinearBackend
from attnmux.parts import LinearStatePool, linear_request
from attnmux.parts import states as linear_states
from attnmux.parts.linear_hybrid import HybridLinearAttnBackend, LinearByPhase
from attnmux.testing import RecordingGraphs, decode, extend, fake_platform, verify
from attnmux.testing.cases.linear import LinearCase, linear_cases
from attnmux.testing.fakes.backend import FakeBackend, fake_card
from attnmux.testing.setup.linear import make_linear_setup, prepare_linear

GDN = {"kind": "gdn", "num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 8, "head_v_dim": 16}


def spec(**changes) -> LinearLayerSpec:
    return LinearLayerSpec(**{"layer_id": 0, **GDN, **changes})


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"num_k_heads": 3}, "num_v_heads"),
        ({"head_v_dim": 0}, "layer"),
        ({"kind": "conv", "conv_dims": (8,), "conv_size": 3}, "layer"),
        ({"conv_dims": (0,), "conv_size": 3}, "conv_dims"),
        ({"conv_dims": (8,)}, "conv_size"),
    ],
)
def test_a_layer_that_contradicts_itself(changes, argument) -> None:
    with pytest.raises(InvalidInput, match=argument):
        spec(**changes)
    with pytest.raises(InvalidInput, match="conv_dims"):
        LinearLayerSpec(layer_id=0, kind="conv")


def test_states_of_requests() -> None:
    layers = (spec(), spec(layer_id=7, conv_dims=(6, 10), conv_size=4))
    pool = LinearStatePool(size=3, layers=layers, conv_dtype=torch.bfloat16, device="cpu")
    assert pool.state(0).shape == (4, 4, 8, 16)
    assert pool.state(0).dtype is torch.float32
    assert [pool.conv(7, index).shape for index in (0, 1)] == [(4, 3, 6), (4, 3, 10)]
    # Of both layers: float32 states of 4 heads, and bfloat16 inputs of the two convolutions of one
    assert pool.nbytes == 4 * (2 * 4 * 8 * 16 * 4 + (6 + 10) * 3 * 2)
    for buffer in pool.buffers:
        buffer.copy_(torch.arange(4).view(-1, *[1] * (buffer.dim() - 1)).expand(buffer.shape))
    pool.copy(2, 1)
    assert [buffer.flatten(1)[:, 0].tolist() for buffer in pool.buffers] == [[0, 2, 2, 3]] * 4
    for rows in ((0, 1), (1, 0), (1, 4)):
        with pytest.raises(InvalidInput, match="a row from 1 to 3"):
            pool.copy(*rows)
    for wrong in (lambda: pool.state(3), lambda: pool.conv(0), lambda: pool.conv(7, 2)):
        with pytest.raises(InvalidInput, match="layer_id"):
            wrong()
    with pytest.raises(InvalidInput, match="a different id"):
        LinearStatePool(size=1, layers=(spec(), spec()), conv_dtype=torch.float32, device="cpu")
    with pytest.raises(InvalidInput, match="size"):
        LinearStatePool(size=0, layers=layers, conv_dtype=torch.float32, device="cpu")


CASE = next(case for case in linear_cases() if case.name == "gdn-extend-prefix")


@pytest.fixture
def setup():
    return make_linear_setup(CASE, fake_platform(), "cpu")


def prepared(setup, lengths):
    step = prepare_linear(setup, lengths, host_lens=False)
    given = step.inputs[0]
    call = {"q": given.q, "k": given.k, "v": given.v, "g": given.g, "beta": given.beta}
    return step.batch, given, call


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda t: t[1:]),
        ("k", lambda t: t.float()),
        ("v", lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
        ("v", lambda t: t[:, :2]),
        ("g", lambda t: t.bfloat16()),
        ("g", lambda t: t.unsqueeze(-1)),
        ("beta", lambda t: None),
        ("beta", lambda t: t[:, :1]),
        ("g", lambda t: t.to("meta")),
    ],
)
def test_bad_calls_leave_the_states_alone(setup, name, change) -> None:
    batch, given, call = prepared(setup, extend((0, 5), (9, 3)))
    backend = TorchLinearBackend(setup.context)
    backend.init_forward_metadata(batch)
    before = [buffer.clone() for buffer in setup.states.buffers]
    with pytest.raises(InvalidInput, match=name):
        backend.forward(layer=given.layer, batch=batch, **{**call, name: change(call[name])})
    after = setup.states.buffers
    assert all(
        torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        for one, other in zip(before, after, strict=True)
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("x", {"x": torch.zeros(8, 95, dtype=torch.bfloat16)}),
        ("x", {"x": torch.zeros(96, 8, dtype=torch.bfloat16).t()}),
        ("weight", {"weight": torch.zeros(96, 3, dtype=torch.bfloat16)}),
        ("bias", {"bias": torch.zeros(95, dtype=torch.bfloat16)}),
        ("index", {"index": 1}),
    ],
)
def test_bad_convolutions(setup, name, changes) -> None:
    batch, given, _ = prepared(setup, extend((0, 5), (9, 3)))
    backend = TorchLinearBackend(setup.context)
    backend.init_forward_metadata(batch)
    x, weight, _ = given.convs[0]
    with pytest.raises(InvalidInput, match=name):
        backend.convolve(layer=given.layer, batch=batch, **{"x": x, "weight": weight, **changes})


def test_results_go_to_the_given_tensor(setup) -> None:
    batch, given, call = prepared(setup, decode(5, 9))
    backend = TorchLinearBackend(setup.context)
    backend.init_forward_metadata(batch)
    out = torch.full_like(call["v"], torch.nan)
    assert backend.forward(layer=given.layer, batch=batch, out=out, **call) is out
    assert out.isfinite().all()


def test_states_after_drafts() -> None:
    layers = (spec(), spec(layer_id=7, conv_dims=(6, 10), conv_size=4))
    given = {"size": 3, "layers": layers, "conv_dtype": torch.bfloat16, "device": "cpu"}
    pool, plain = LinearStatePool(**given, kept_size=2, draft_tokens=5), LinearStatePool(**given)
    assert pool.draft_state(7).shape == (4, 5, 4, 8, 16)
    assert [pool.draft_conv(7, index).shape for index in (0, 1)] == [(4, 8, 6), (4, 8, 10)]
    assert pool.draft_nbytes == 4 * (2 * 5 * 4 * 8 * 16 * 4 + (6 + 10) * 8 * 2)
    own = sum(buffer.nbytes for buffer in pool.buffers)
    assert pool.nbytes == own + pool.draft_nbytes
    assert (plain.draft_buffers, plain.draft_nbytes) == ((), 0)
    for wrong in (lambda: plain.draft_state(7), lambda: pool.draft_conv(0)):
        with pytest.raises(InvalidInput, match="of a pool with draft_tokens"):
            wrong()
    with pytest.raises(InvalidInput, match="draft_tokens"):
        LinearStatePool(**given, draft_tokens=-1)
    with pytest.raises(PoolExhausted, match=r"9 draft tokens .* or of draft tokens"):
        LinearStatePool(**{**given, "size": 1 << 40}, draft_tokens=9)


@pytest.mark.parametrize("copied", [1, linear_states.COPIED_BYTES])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_accepted_states(monkeypatch, dtype, copied) -> None:
    monkeypatch.setattr(linear_states, "COPIED_BYTES", copied)
    layers = (spec(), spec(layer_id=7, conv_dims=(6,), conv_size=4))
    pool = LinearStatePool(
        size=4, layers=layers, conv_dtype=torch.float32, device="cpu", draft_tokens=3
    )
    for buffer in (*pool.buffers, *pool.draft_buffers):
        buffer.normal_()
    pool.state(0)[3] = torch.nan
    before = [buffer.clone() for buffer in pool.buffers]
    rows, counts = torch.tensor([4, 0, 1, 3]), torch.tensor([2, 1, 3, 0], dtype=dtype)
    graphs, step = RecordingGraphs(), lambda: pool.accept(rows, counts)
    with graphs.session():  # it neither waits for the device nor reads on the host
        graphs.capture(GraphStep(prepare=lambda: None, forward=step))
    for layer_id in (0, 7):
        state, drafted = pool.state(layer_id), pool.draft_state(layer_id)
        assert state[4].equal(drafted[4, 1])
        assert state[1].equal(drafted[1, 2])
    assert pool.conv(7)[4].equal(pool.draft_conv(7)[4, 2:5])
    assert pool.conv(7)[1].equal(pool.draft_conv(7)[1, 3:6])
    for buffer, old in zip(pool.buffers, before, strict=True):
        assert buffer[[2, 3]].nan_to_num(7).equal(old[[2, 3]].nan_to_num(7))


def test_layers_that_are_alike_are_copied_together() -> None:
    def operations(count: int) -> tuple[int, int]:
        layers = [spec(layer_id=number, conv_dims=(6, 10), conv_size=4) for number in range(count)]
        given = {"size": 3, "layers": layers, "conv_dtype": torch.bfloat16, "device": "cpu"}
        pool = LinearStatePool(**given, draft_tokens=3)
        rows = torch.tensor([1, 3])
        with Operations() as accepting:
            pool.accept(rows, torch.tensor([2, 0]))
        with Operations() as copying:
            pool.copy(1, 2)
        return accepting.count, copying.count

    assert operations(12) == operations(1)


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_what_cannot_be_accepted() -> None:
    given = {"size": 3, "layers": (spec(),), "conv_dtype": torch.float32, "device": "cpu"}
    rows, counts = torch.tensor([1, 2]), torch.tensor([1, 1])
    with pytest.raises(InvalidInput, match="draft_tokens: expected"):
        LinearStatePool(**given).accept(rows, counts)
    pool = LinearStatePool(**given, draft_tokens=2)
    for wrong, said in (
        ((rows.int(), counts), "rows"),
        ((rows, counts[:1]), "num_accepted_tokens"),
        ((rows, counts.float()), "num_accepted_tokens"),
        ((rows, counts.to("meta")), "one on cpu"),
    ):
        with pytest.raises(InvalidInput, match=said):
            pool.accept(*wrong)


def test_a_pool_knows_the_device_of_its_tensors() -> None:
    # As "cuda", which is not the device "cuda:0" of a tensor
    pool = LinearStatePool(
        size=3, layers=(spec(),), conv_dtype=torch.float32, device="cpu:0", draft_tokens=2
    )
    pool.accept(torch.tensor([1, 2]), torch.tensor([1, 1]))
    assert pool.device == pool.buffers[0].device


VERIFY = replace(CASE, name="gdn-verify", steps=(verify(3, 9, 4),))


def test_drafts_that_no_state_follows() -> None:
    setup = make_linear_setup(VERIFY, fake_platform(), "cpu")
    batch, given, call = prepared(setup, VERIFY.steps[0])
    backend = TorchLinearBackend(setup.context)
    backend.init_forward_metadata(batch)
    tree = replace(batch.spec_info, topk=2)
    mask = replace(batch.spec_info, visible=torch.ones(2, 3, 3, dtype=torch.bool))
    for spec_info, said in (
        (tree, "chains: the states of a tree's branches are not kept"),
        (mask, "chains"),
        (None, "the drafts of a verify step"),
        (SpecInput(draft_token_num=5), "1 to 4, for which the states have room"),
        (SpecInput(draft_token_num=2), "2 of each"),
    ):
        wrong = replace(batch, spec_info=spec_info)
        with pytest.raises(InvalidInput, match=said):
            backend.init_forward_metadata(wrong)
        with pytest.raises(InvalidInput, match=said):
            backend.forward(layer=given.layer, batch=wrong, **call)
        x, weight, _ = given.convs[0]
        with pytest.raises(InvalidInput, match=said):
            backend.convolve(x, weight, given.layer, wrong)
    silent = Noted(setup.context)
    silent.init_forward_metadata(batch)
    with pytest.raises(AttnmuxError, match="Noted verifies no drafts"):
        silent.forward(layer=given.layer, batch=batch, **call)
    with pytest.raises(AttnmuxError, match="Noted verifies no drafts"):
        silent.convolve(x, weight, given.layer, batch)


def test_steps_of_a_draft_model_are_refused(setup) -> None:
    batch, _, _ = prepared(setup, extend((4, 2)))
    backend = TorchLinearBackend(setup.context)
    with pytest.raises(InvalidInput, match="no step of a draft model"):
        backend.init_forward_metadata(replace(batch, forward_mode=ForwardMode.DRAFT_EXTEND))
    with pytest.raises(InvalidInput, match="extend_seq_lens"):
        backend.init_forward_metadata(replace(batch, extend_seq_lens=None))
    with pytest.raises(InvalidInput, match="linear_states"):
        TorchLinearBackend(replace(setup.context, linear_states=None))


class Noted(LinearAttentionBackend):
    """Writes down what it is asked to do."""

    def __init__(self, context) -> None:
        super().__init__(context)
        self.said: list[str] = []

    def init_forward_metadata_out_graph(self, batch, in_capture=False) -> None:
        self.said.append("prepare")

    def init_forward_metadata_in_graph(self, batch) -> None:
        self.said.append("in graph")

    def forward_decode(self, call, batch) -> None:
        self.said.append("decode")

    def forward_extend(self, call, batch) -> None:
        self.said.append("extend")

    def forward_conv(self, call, batch) -> None:
        self.said.append("conv")


def test_a_backend_for_each_phase(setup) -> None:
    first, second = Noted(setup.context), Noted(setup.context)
    both = LinearByPhase(extend=first, decode=second)
    for lengths in (extend((0, 5), (9, 3)), decode(5, 9)):
        batch, given, call = prepared(setup, lengths)
        both.init_forward_metadata(batch)
        both.forward(layer=given.layer, batch=batch, **call)
        x, weight, _ = given.convs[0]
        both.convolve(x, weight, given.layer, batch)
    assert first.said == ["prepare", "in graph", "extend", "conv"]
    assert second.said == ["prepare", "in graph", "decode", "conv"]
    with pytest.raises(GraphUnsupported, match="Noted"):
        both.init_cuda_graph_state(2, 2)


class Verifies(Noted):
    def forward_verify(self, call, batch) -> None:
        self.said.append("verify")

    def verify_conv(self, call, batch) -> None:
        self.said.append("verify conv")

    def init_cuda_graph_state(self, max_bs, max_num_tokens) -> None:
        self.said.append("graphs")


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_the_backend_that_verifies(mode) -> None:
    setup = make_linear_setup(VERIFY, fake_platform(), "cpu")
    request = setup.context.request.replace(speculative_attention_mode=mode)
    context = replace(setup.context, request=request)
    first, second = Verifies(context), Verifies(context)
    both = LinearByPhase(extend=first, decode=second)
    batch, given, call = prepared(setup, VERIFY.steps[0])
    both.init_forward_metadata(batch)
    both.forward(layer=given.layer, batch=batch, **call)
    x, weight, _ = given.convs[0]
    both.convolve(x, weight, given.layer, batch)
    both.init_cuda_graph_state(2, 6)
    said = ["prepare", "in graph", "verify", "verify conv", "graphs"]
    assert (first.said, second.said) == ((said, ["graphs"]) if mode == "prefill" else ([], said))


def test_a_hybrid_prepares_all_of_its_backends(setup) -> None:
    full, linear = FakeBackend(setup.context), Noted(setup.context)
    hybrid = HybridLinearAttnBackend(full, {"gdn": linear})
    batch, _, _ = prepared(setup, decode(1, 1))
    hybrid.init_forward_metadata(batch)
    hybrid.init_forward_metadata_out_graph(batch)
    hybrid.init_forward_metadata_in_graph(batch)
    assert linear.said == ["prepare", "in graph"] * 2
    assert hybrid.linear("gdn") is linear
    assert hybrid.select(ForwardMode.DECODE) is hybrid
    with pytest.raises(InvalidInput, match="one of gdn"):
        hybrid.linear("kda")
    with pytest.raises(InvalidInput, match="no linear layers"):
        full.linear("gdn")
    with pytest.raises(InvalidInput, match="a backend for each kind"):
        HybridLinearAttnBackend(full, {})


CPU = probe_cpu()
DRAFTS = {"spec_topk": 1, "spec_draft_tokens": 4}
NEEDS = {"dtype": "bfloat16", "page_size": 1, "num_q_heads": 1, "num_kv_heads": 1, "head_dim": 8}


def decided(**changes):
    needs = {**NEEDS, "linear_layers": {"gdn": 2}, "linear_head_dim": 64, **changes}
    return solve(Request(**needs), CPU, Plugins.load().offers())


def context_of(setup, decision):
    layer = LayerSpec(
        layer_id=0,
        tp_q_head_num=1,
        tp_k_head_num=1,
        tp_v_head_num=1,
        qk_head_dim=8,
        v_head_dim=8,
        scaling=1.0,
    )
    return replace(setup.context, request=decision.request, platform=CPU, layers=(layer,))


def test_a_decision_becomes_a_hybrid(setup) -> None:
    decision = decided()
    assert {choice.backend for choice in decision.parts["linear_layers"]["gdn"].values()} == {
        "torch_linear"
    }
    assert decision.unserved_layers == ()
    assert "torch_linear (cpu) serves 2 gdn layers" in decision.summary()
    context = context_of(setup, decision)
    made = build(decision, context)
    assert isinstance(made.linear("gdn"), TorchLinearBackend)
    assert decided(linear_layers={}).hash != decision.hash
    with pytest.raises(InvalidInput, match="a LinearStatePool for the model's gdn layers"):
        build(decision, replace(context, linear_states=None))
    for wrong, said in (
        ({"linear_layers": {"kda": 2}}, "a kind that the decision serves: kda"),
        ({"linear_layers": {}}, "the decision has no linear layers"),
        ({"linear_head_dim": 32}, "32, as decided"),
        ({"linear_v_head_dim": 128}, "128, as decided"),
        ({"two_batches": True}, "no half of a step"),
        (DRAFTS, "a LinearStatePool with draft_tokens=4"),
    ):
        other = decided(**wrong)
        with pytest.raises(InvalidInput, match=said):
            build(other, context_of(setup, other))


def test_a_factory_that_makes_something_else(setup) -> None:
    decision = decided()
    choice = replace_choice(decision, "attnmux.testing.fakes.backend:FakeBackend")
    with pytest.raises(AttnmuxError, match="made a FakeBackend"):
        build(choice, context_of(setup, decision))


def replace_choice(decision, factory):
    served = {
        phase: replace(choice, factory=factory)
        for phase, choice in decision.parts["linear_layers"]["gdn"].items()
    }
    return replace(decision, parts={"linear_layers": {"gdn": served}})


def test_a_named_backend_serves_the_linear_layers_or_nobody_does() -> None:
    request = Request(**NEEDS, linear_layers={"gdn": 2}, linear_head_dim=64)
    offers = Plugins.load().offers()
    named = solve(request, CPU, offers, Policy(linear_backend="torch_linear"))
    assert named.parts["linear_layers"]["gdn"]["decode"].origin == "user"
    with pytest.raises(NoBackend, match="torch_native"):
        solve(request, CPU, offers, Policy(linear_backend="torch_native"))
    without = [offer for offer in offers if offer.card.name != "torch_linear"]
    left = solve(request, CPU, without)
    assert left.unserved_layers == (("gdn", 2),)
    assert "no backend serves 2 gdn layers" in left.summary()


def test_a_loaded_decision_is_checked_here() -> None:
    decision = type(decided()).from_json(decided().to_json())
    offers = Plugins.load().offers()
    decision.check(CPU, offers)
    without = [offer for offer in offers if offer.card.name != "torch_linear"]
    with pytest.raises(InvalidInput, match="torch_linear for extend and decode is offered by no"):
        decision.check(CPU, without)


def test_phases_may_have_backends_of_their_own() -> None:
    decoder = replace(
        TORCH_LINEAR,
        name="decoder",
        priors=(),
        clauses=tuple(replace(each, phase=one_of("decode")) for each in TORCH_LINEAR.clauses),
    )
    offers = [offer for offer in Plugins.load().offers() if offer.card.name != "torch_linear"]
    prefill = replace(
        TORCH_LINEAR,
        clauses=tuple(replace(each, phase=one_of("extend")) for each in TORCH_LINEAR.clauses),
    )
    offers += [Offer(card=card, plugin="x", distribution="x") for card in (decoder, prefill)]
    request = Request(**NEEDS, linear_layers={"gdn": 2}, linear_head_dim=64)
    decision = solve(request, CPU, offers)
    assert "torch_linear (extend) and decoder (decode) serves" in decision.summary()


@pytest.mark.parametrize("case", [CASE], ids=lambda case: case.name)
def test_cases_are_plain_data(case) -> None:
    assert isinstance(case, LinearCase)
    assert (case.phases, case.execution) == (("extend",), "eager")


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_the_backend_of_decode_or_extend_verifies(mode) -> None:
    """And no layer asks for the phase of a draft model."""
    asked = Request(**NEEDS, **DRAFTS, linear_layers={"gdn": 2}, linear_head_dim=64)
    asked = asked.replace(speculative_attention_mode=mode)
    own = linear_request(asked, "gdn")
    assert own.phases == ("extend", "decode", "verify")
    assert own.speculative_attention_mode == mode
    clauses = {
        phases: tuple(replace(each, phase=one_of(*phases)) for each in TORCH_LINEAR.clauses)
        for phases in (("extend", "verify"), ("decode", "verify"))
    }
    offers = [offer for offer in Plugins.load().offers() if offer.card.name != "torch_linear"]
    offers += [
        Offer(
            card=replace(TORCH_LINEAR, name=name, priors=(), clauses=clauses[phases]),
            plugin="x",
            distribution="x",
        )
        for name, phases in (("one", ("extend", "verify")), ("other", ("decode", "verify")))
    ]
    served = solve(asked, CPU, offers).parts["linear_layers"]["gdn"]
    assert served["verify"] == served["extend" if mode == "prefill" else "decode"]


def test_linear_layers_do_not_verify_trees_that_attention_verifies_in_two_parts() -> None:
    offers = [offer for offer in Plugins.load().offers() if offer.card.name == "torch_linear"]
    card = fake_card(spec_topk=one_of(1), vendor=one_of("cpu"))
    offers.append(Offer(card=card, plugin="fake", distribution="fake"))
    trees = {**NEEDS, "spec_topk": 4, "spec_draft_tokens": 6}
    plain = solve(Request(**trees), CPU, offers)
    assert plain.answer("draft_trees", "prefixes", "decode") is not None
    decision = solve(Request(**trees, linear_layers={"gdn": 2}, linear_head_dim=64), CPU, offers)
    assert decision.answer("draft_trees", "prefixes", "decode") == plain.answer(
        "draft_trees", "prefixes", "decode"
    )
    assert decision.unserved_layers == (("gdn", 2),)
