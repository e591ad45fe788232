"""Decode steps on the backend of their batch size, eagerly and from graphs."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from attnmux.core import (
    BackendFailed,
    ForwardContext,
    ForwardMode,
    GraphConfig,
    GraphRunner,
    InvalidInput,
    ModelInput,
    Offer,
    build,
    solve,
)
from attnmux.core.choosing.choice import Choice, SizeRange
from attnmux.core.composites.dispatch import BatchSizeAttnBackend, HybridAttnBackend, Sizes
from attnmux.core.plugin import Option
from attnmux.testing import (
    Candidate,
    Case,
    GraphFakeBackend,
    RecordingGraphs,
    decode,
    extend,
    fake_platform,
    graph_card,
    in_graphs,
    make_setup,
    prepare_step,
    run_case,
    standard_cases,
    verify,
)

CASE = Case(
    name="sizes",
    steps=(decode(40, 30, 14, 17, 9), extend((3, 5), (0, 2))),
    dtype="float32",
    page_size=4,
    windows=(None,),
)
NAMES = ("usual", "small", "large")


class Leaf(GraphFakeBackend):
    """Notes what it is asked for."""

    def __init__(self, context, options=None) -> None:
        super().__init__(context, options or {})
        self.calls: list[object] = []

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.calls.append(("state", max_bs, max_num_tokens))
        super().init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, batch, in_capture=False) -> None:
        self.calls.append(("plan", batch.batch_size, in_capture))
        super().init_forward_metadata_out_graph(batch, in_capture)

    def save_kv(self, *args, **kwargs) -> None:
        self.calls.append("save_kv")
        super().save_kv(*args, **kwargs)

    def forward_decode(self, call, batch) -> torch.Tensor:
        self.calls.append("decode")
        return super().forward_decode(call, batch)

    def forward_extend(self, call, batch) -> torch.Tensor:
        self.calls.append("extend")
        return super().forward_extend(call, batch)


class Long(Leaf):
    """Pads otherwise."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 7


class Broken(Leaf):
    def __init__(self, context, options=None) -> None:
        raise OSError("libkernels.so: cannot open shared object file")


def of_sizes(context) -> BatchSizeAttnBackend:
    """small decodes 1 and 2 requests, large 5 and more."""
    usual, small, large = (Leaf(context) for _ in NAMES)
    sizes = [Sizes(least=5, most=None, backend=large), Sizes(least=1, most=2, backend=small)]
    return BatchSizeAttnBackend(usual=usual, sizes=sizes)


def leaves(backend: BatchSizeAttnBackend) -> dict[str, Leaf]:
    found = (backend.usual, *(each.backend for each in backend.sizes))
    return dict(zip(NAMES, found, strict=True))


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (decode(4), "small"),
        (decode(4, 9), "small"),
        (decode(4, 9, 3), "usual"),
        (decode(4, 9, 3, 8), "usual"),
        (decode(4, 9, 3, 8, 2), "large"),
        (extend((3, 5)), "usual"),
        (extend((3, 5), (6, 1), mode=ForwardMode.MIXED), "usual"),
        (extend((8, 2), mode=ForwardMode.DRAFT_EXTEND), "usual"),
        (verify(3, 8), "usual"),
    ],
)
def test_a_step_goes_to_the_backend_of_its_size(step, name) -> None:
    case = Case(name="sizes", steps=(step,), page_size=4, spec_topk=1)
    setup = make_setup(case, fake_platform(), "cpu")
    backend = of_sizes(setup.context)
    prepared = prepare_step(setup, step)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    backend.forward(given.q, given.k, given.v, given.layer, prepared.batch)
    ran = "decode" if step.mode.is_decode() else "extend"
    plan = ("plan", prepared.batch.batch_size, False)
    calls = {key: leaf.calls for key, leaf in leaves(backend).items()}
    assert calls == {**{key: [] for key in NAMES}, name: [plan, "save_kv", ran]}
    serving = backend.select(step.mode)
    assert serving is (backend if step.mode.is_decode() else backend.usual)


def test_each_graph_has_the_backend_of_its_size() -> None:
    """5 requests of 5 sizes, padded: replays are right, by the backend that was captured."""
    setup = make_setup(CASE, fake_platform(), "cpu")
    backend = of_sizes(setup.context)
    step = prepare_step(setup, CASE.steps[0])
    given = step.inputs[0]

    def model(batch, inputs):
        backend = ForwardContext.current().backend
        return backend.forward(inputs["q"], None, None, given.layer, batch)

    runner = GraphRunner(
        backend,
        model,
        GraphConfig(batch_sizes=(1, 2, 4, 8)),
        devices=RecordingGraphs(),
        inputs={"q": ModelInput(dtype=torch.float32, trailing=tuple(given.q.shape[1:]))},
        progress=iter,
    )
    runner.capture()
    made = leaves(backend)
    captured = {
        name: sorted({call[1] for call in leaf.calls if call[0] == "plan" and call[2]})
        for name, leaf in made.items()
    }
    assert captured == {"usual": [4], "small": [1, 2], "large": [8]}
    states = {name: [c[1:] for c in leaf.calls if c[0] == "state"] for name, leaf in made.items()}
    assert states == {"usual": [(8, 8)], "small": [(2, 2)], "large": [(8, 8)]}
    eager = GraphFakeBackend(setup.context)
    eager.save_kv(given.k, given.v, given.layer, step.batch)
    for count, name in ((1, "small"), (2, "small"), (3, "usual"), (4, "usual"), (5, "large")):
        for leaf in made.values():
            leaf.calls.clear()
        batch = first(step.batch, count)
        replayed = runner.replay(batch, {"q": given.q[:count]})
        eager.init_forward_metadata(batch)
        expected = eager.forward(given.q[:count], None, None, given.layer, batch)
        torch.testing.assert_close(replayed, expected)
        planned = {key: [c for c in leaf.calls if c[0] == "plan"] for key, leaf in made.items()}
        assert [key for key, calls in planned.items() if calls] == [name]


def first(batch, count: int):
    """The first requests of a decode step."""
    fields = ("req_pool_indices", "seq_lens", "out_cache_loc", "positions")
    parts = {name: getattr(batch, name)[:count] for name in fields}
    return replace(batch, batch_size=count, **parts)


def test_it_passes_the_suite_of_its_leaves() -> None:
    cases = [
        case
        for case in standard_cases((16,))
        if case.name.startswith(("decode-changing", "decode-uneven", "decode-padding", "extend-th"))
        or case.name.startswith(("decode-and-verify", "decode-larger"))
    ]
    candidate = Candidate(
        card=graph_card(), platform=fake_platform(), factory=lambda context, _: of_sizes(context)
    )
    for case in (*cases, *in_graphs(cases)):
        outcome = run_case(candidate, case)
        assert outcome.status == "passed", f"{case.name}: {outcome.message}"


def test_what_cannot_stand_together() -> None:
    context = make_setup(CASE, fake_platform(), "cpu").context
    other = make_setup(CASE, fake_platform(), "cpu").context
    usual = Leaf(context)
    with pytest.raises(InvalidInput, match="a backend of another context"):
        BatchSizeAttnBackend(usual=usual, sizes=[Sizes(least=1, most=2, backend=Leaf(other))])
    with pytest.raises(InvalidInput, match="1 as `seq_lens` of a padding row"):
        BatchSizeAttnBackend(usual=usual, sizes=[Sizes(least=1, most=2, backend=Long(context))])
    for ranges in (((1, 4), (4, None)), ((1, None), (8, 9)), ((3, 2),), ((0, 2),)):
        sizes = [Sizes(least=a, most=b, backend=Leaf(context)) for a, b in ranges]
        with pytest.raises(InvalidInput, match="ranges that do not overlap"):
            BatchSizeAttnBackend(usual=usual, sizes=sizes)


@pytest.fixture
def importable(monkeypatch, request) -> None:
    monkeypatch.setitem(sys.modules, __name__, request.module)


def decided(small: str, *, options: dict[str, object] | None = None, prefill: str = "Leaf"):
    """A decision whose steps of 1 and 2 requests are decoded by a class of this module."""
    option = Option(name="splits", type=int, default=0)

    def offer(name: str, factory: str) -> Offer:
        card = replace(graph_card(), name=name, factory=f"{__name__}:{factory}", options=(option,))
        return Offer(card=card, plugin="fakes")

    usual = offer("usual", "Leaf")
    decision = solve(CASE.request, fake_platform(), [usual])
    choice = Choice.of(offer("small", small), options or {})
    phases = dict(decision.phases)
    if prefill != "Leaf":
        phases["extend"] = Choice.of(offer("prefill", prefill), {})
    sizes = (SizeRange(least=1, most=2, choice=choice, gain=0.1),)
    return replace(decision, phases=phases, decode_sizes=sizes)


class Prefill(Leaf):
    """Another one for extend."""


@pytest.mark.usefixtures("importable")
def test_build_makes_it_with_the_options_of_each() -> None:
    context = make_setup(CASE, fake_platform(), "cpu").context
    backend = build(decided("Leaf", options={"splits": 8}), context)
    assert isinstance(backend, BatchSizeAttnBackend)
    (small,) = backend.sizes
    assert (small.least, small.most) == (1, 2)
    assert (small.backend.options, backend.usual.options) == ({"splits": 8}, {"splits": 0})
    assert small.backend.context is backend.usual.context is context


@pytest.mark.usefixtures("importable")
def test_build_with_another_backend_for_extend() -> None:
    context = make_setup(CASE, fake_platform(), "cpu").context
    backend = build(decided("Leaf", prefill="Prefill"), context)
    assert isinstance(backend, BatchSizeAttnBackend)
    assert isinstance(backend.usual, HybridAttnBackend)
    assert type(backend.select(ForwardMode.EXTEND)) is Prefill
    assert backend.select(ForwardMode.DECODE) is backend


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(
    ("small", "said"), [("Broken", "libkernels.so"), ("Long", "padding rows of 7 tokens")]
)
def test_one_that_cannot_be_made_is_named(small, said) -> None:
    """So that `make_first` decides again without it."""
    context = make_setup(CASE, fake_platform(), "cpu").context
    with pytest.raises(BackendFailed, match=said) as raised:
        build(decided(small), context)
    assert raised.value.address == "fakes/small"
