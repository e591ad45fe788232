"""A part of a package of its own: one file that demands, asks, is checked, built and explained."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from attnmux.core import (
    Decision,
    DispatchingBackend,
    InvalidInput,
    NoBackend,
    Plugins,
    Policy,
    Request,
    build,
    make_backend,
    solve,
)
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import ANY, Ask, Part
from attnmux.testing import Case, extend, make_setup


class Echo(Part):
    """Prompts twice: the answer is the main backend's, and a second one checks it."""

    factory = f"{__name__}:make_echo"

    def wants(self, request):
        return request.kind == "mha"

    def asks(self, request):
        asked = request.replace(origin="model", phases=("extend",), parts=())
        return {"witness": Ask(request=asked, named_for="extend")}

    def lines(self, request, served):
        return [f"{served['witness']['extend'].backend} runs {dict(request.parts)['echo']} times"]


ECHO = Echo()


class EchoBackend(DispatchingBackend):
    def __init__(self, child, witness):
        super().__init__(child.context, (child,))
        self.witness = witness


def make_echo(inner, decision, context, phases):
    choice = decision.parts["echo"]["witness"]["extend"]
    return EchoBackend(inner(context, phases), make_backend(choice, context))


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch) -> None:
    """As pip leaves it."""
    info = tmp_path / "acme_echo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-echo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[attnmux.parts]\necho = {__name__}:ECHO\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def setup():
    case = Case(name="echo", steps=(extend((5, 9)),), page_size=4)
    return make_setup(case, probe_cpu(), "cpu", seed=0)


def decided(request: Request) -> Decision:
    return solve(request, probe_cpu(), Plugins.load().offers(), Policy(backend="torch_native"))


def test_it_is_demanded_decided_checked_built_and_explained(setup) -> None:
    plain = setup.context.request
    asked = Request.parse("parts=echo:3").parts
    decision = decided(plain.replace(parts=asked))
    assert decision.answer("echo", "witness", "extend").backend == "torch_native"
    assert "torch_native runs 3 times" in decision.summary()
    others = decided(plain), decided(plain.replace(parts={"echo": 2}))
    assert len({each.hash for each in (decision, *others)}) == 3

    read = Decision.from_json(decision.to_json())
    assert (read.hash, read.parts) == (decision.hash, decision.parts)
    read.check(probe_cpu(), Plugins.load().offers())
    made = build(read, replace(setup.context, request=decision.request))
    assert isinstance(made, EchoBackend)
    assert type(made.witness) is type(made.members[0])


def test_a_changed_answer_does_not_hold(setup) -> None:
    decision = decided(setup.context.request.replace(parts={"echo": 1}))
    other = replace(decision.answer("echo", "witness", "extend"), version="0")
    changed = replace(decision, parts={"echo": {"witness": {"extend": other}}})
    offers = Plugins.load().offers()
    with pytest.raises(InvalidInput, match=r"version .* here, 0 in the decision"):
        changed.check(probe_cpu(), offers)
    without = replace(decision, parts={})
    with pytest.raises(InvalidInput, match="demands the part echo, and the decision has none"):
        without.check(probe_cpu(), offers)


def test_without_its_package_nothing_serves_what_demands_it(setup, monkeypatch) -> None:
    asked = setup.context.request.replace(parts={"echo": 1})
    decision = decided(asked)
    monkeypatch.setattr(sys, "path", sys.path[1:])
    with pytest.raises(NoBackend, match="the part echo is not installed"):
        decided(asked)
    with pytest.raises(InvalidInput, match="the part echo is not installed"):
        decision.check(probe_cpu(), Plugins.load().offers())
    assert "the part echo is not installed" in decision.summary()


def test_a_part_that_does_not_want_the_request_refuses_it(setup) -> None:
    asked = setup.context.request.replace(parts={"echo": 1}, kind="dual_chunk")
    with pytest.raises(NoBackend, match="echo does not take such a request"):
        decided(asked)


@pytest.mark.parametrize(
    "demand",
    [
        {"linear_layers": {"gdn": 2}, "linear_head_dim": 64},
        {"sparse": "quest", "sparse_budget": 64, "page_size": 16},
        {"index_topk": 4, "index_block_size": 16},
        {"two_batches": True},
    ],
    ids=lambda demand: next(iter(demand)),
)
def test_what_demands_an_absent_part_is_refused_with_its_line(demand) -> None:
    """And never served without it."""
    asked = Request.parse("num_q_heads=8,num_kv_heads=2,head_dim=64,dtype=bf16").replace(**demand)
    offers = Plugins.load().offers()
    assert solve(asked, probe_cpu(), offers).parts
    with pytest.raises(NoBackend, match="pip install attnmux-parts"):
        solve(asked, probe_cpu(), offers, parts=no_part)


def test_what_can_do_without_a_part_says_what_would_help() -> None:
    offers = Plugins.load().offers()
    latent = Request.parse(
        "kind=mla,num_q_heads=16,num_kv_heads=1,head_dim=192,v_head_dim=128,kv_lora_rank=512,"
        "qk_rope_head_dim=64,dtype=bf16,chunked_prefix=true"
    )
    decision = solve(latent, probe_cpu(), offers, parts=no_part)
    assert not decision.parts
    assert "pip install attnmux-parts" in decision.summary()
    assert "pip install" not in solve(latent, probe_cpu(), offers).summary()


def test_a_refused_tree_names_the_part_that_could_verify_it(offer, cpu) -> None:
    maskless = [offer("maskless", lse=ANY)]
    asked = Request.parse(
        "num_q_heads=8,num_kv_heads=2,head_dim=64,dtype=bf16,spec_topk=2,spec_draft_tokens=4"
    )
    assert "draft_trees" in solve(asked, cpu, maskless).parts
    with pytest.raises(NoBackend, match="pip install attnmux-parts") as refused:
        solve(asked, cpu, maskless, parts=no_part)
    assert refused.value.candidates


def no_part(name: str) -> None:
    """Of a process without attnmux-parts."""
