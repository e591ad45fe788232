"""Steps of linear layers: their checks, their costs, their default sizes, and `attnmux bench`."""

from __future__ import annotations

import json
import time

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import Measurement, Policy, Request
from attnmux.core.cli.verbs import verbs
from attnmux.cpu.plugin import TORCH_LINEAR
from attnmux.cpu.torch_linear import TorchLinearBackend
from attnmux.testing import RecordingGraphs
from attnmux.testing.bench import Ceilings, Workload, completed, cost_of, default_grid
from attnmux.testing.bench.conformance import check_conformance
from attnmux.testing.bench.entrants import find_entrants
from attnmux.testing.bench.measuring import Bench
from attnmux.testing.bench.shapes import LINEAR_SHAPES

SMALL = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "v_head_dim": 8, "dtype": "bfloat16"}
CHANNELS = {**SMALL, "num_kv_heads": 1, "v_head_dim": 1}
DECODE, EXTEND, START = (
    Workload.parse(text)
    for text in ("decode:bs=3,ctx=21", "extend:bs=2,new=70,prefix=7", "extend:bs=2,new=5")
)
MIXED = Workload.parse("extend:bs=2,new=5,prefix=7,decoding=2,ctx=9")
STEPS = (DECODE, EXTEND, START)
FIELDS = "kind=gdn,dtype=bf16,num_q_heads=4,num_kv_heads=2,head_dim=16"
VERB_STEPS = ("--workload", "decode:bs=2,ctx=9", "--workload", "extend:bs=1,new=3")
QUICK = ("--seconds", "0.003", "--check-seconds", "0.2", "--json")


class Slow(TorchLinearBackend):
    def forward_decode(self, call, batch) -> None:
        time.sleep(2e-3)
        super().forward_decode(call, batch)


class WritesNoState(TorchLinearBackend):
    def forward_decode(self, call, batch) -> None:
        state = self.states.state(call.layer.layer_id)
        before = state.clone()
        super().forward_decode(call, batch)
        state.copy_(before)


class ForgetsStates(TorchLinearBackend):
    """Starts every request from zeros."""

    def forward_extend(self, call, batch) -> None:
        self.states.state(call.layer.layer_id).zero_()
        super().forward_extend(call, batch)


class Halves(TorchLinearBackend):
    def forward_conv(self, call, batch) -> None:
        super().forward_conv(call, batch)
        call.out.mul_(0.5)


def small(kind: str) -> Request:
    shapes = {} if kind == "conv" else CHANNELS if kind == "mamba1" else SMALL
    return completed(Request(kind=kind, **shapes))


@pytest.fixture
def linear_offer(make_offer):
    return lambda factory: make_offer(factory, card=lambda: TORCH_LINEAR)


def rows(here, offers, request, workloads=STEPS, *, graphs=None, phases=("decode", "extend")):
    entrants, refused = find_entrants(
        request, here, offers, Policy(), phases=phases, graphs=graphs is not None
    )
    assert not refused
    bench = Bench(
        device=torch.device("cpu"),
        ceilings=Ceilings(read_gbs=10.0, matmul_tflops=1.0),
        graphs=graphs,
        seconds=0.003,
    )
    return list(bench.rows(workloads, entrants))


@pytest.mark.parametrize("kind", list(LINEAR_SHAPES))
def test_every_kind_is_timed_and_right(kind, here, linear_offer) -> None:
    steps = (*STEPS, MIXED)
    found = rows(here, [linear_offer(TorchLinearBackend)], small(kind), steps)
    assert [(row.workload, row.status) for row in found] == [(each, "measured") for each in steps]
    assert all(row.median_us > 0 and 0 < row.error < 5e-3 for row in found)


VERIFY = tuple(Workload.parse(f"verify:bs=3,new=4{more}") for more in (",prefix=21", ""))
CHAINS = {"spec_topk": 1, "spec_draft_tokens": 4}


class KeepsNoDraft(TorchLinearBackend):
    def forward_verify(self, call, batch) -> None:
        drafted = self.states.draft_state(call.layer.layer_id)
        before = drafted.clone()
        super().forward_verify(call, batch)
        drafted.copy_(before)


@pytest.mark.parametrize("graphs", [None, RecordingGraphs()])
@pytest.mark.parametrize("kind", list(LINEAR_SHAPES))
def test_drafts_are_timed_and_right(kind, graphs, here, linear_offer) -> None:
    request = small(kind).replace(**CHAINS)
    offers = [linear_offer(TorchLinearBackend)]
    found = rows(here, offers, request, VERIFY, graphs=graphs, phases=("verify",))
    assert [(row.workload, row.status) for row in found] == [(each, "measured") for each in VERIFY]
    assert all(row.median_us > 0 and 0 < row.error < 5e-3 for row in found)


def test_wrong_states_after_drafts_are_not_timed(here, linear_offer) -> None:
    request = small("gdn").replace(**CHAINS)
    offers = [linear_offer(TorchLinearBackend), linear_offer(KeepsNoDraft)]
    found = rows(here, offers, request, VERIFY, phases=("verify",))
    assert {(row.backend, row.status) for row in found} == {
        ("fakes/TorchLinearBackend", "measured"),
        ("fakes/KeepsNoDraft", "wrong"),
    }


@pytest.mark.parametrize(
    ("factory", "kind", "wrong"),
    [
        (WritesNoState, "gdn", {DECODE}),
        (ForgetsStates, "mamba2", {EXTEND}),
        (Halves, "conv", set(STEPS)),
    ],
)
def test_wrong_answers_and_wrong_states_are_not_timed(
    factory, kind, wrong, here, linear_offer
) -> None:
    """The backend before a wrong one leaves right answers and states in the step."""
    offers = [linear_offer(TorchLinearBackend), linear_offer(factory)]
    found = rows(here, offers, small(kind))
    by_backend = {row.backend: set() for row in found}
    for row in found:
        if row.status == "wrong":
            by_backend[row.backend].add(row.workload)
    assert by_backend == {"fakes/TorchLinearBackend": set(), f"fakes/{factory.__name__}": wrong}


def test_decode_is_timed_from_graphs(here, linear_offer) -> None:
    request = small("kda")
    found = rows(here, [linear_offer(TorchLinearBackend)], request, graphs=RecordingGraphs())
    assert [(row.execution, row.status) for row in found] == [
        ("graph", "measured"),
        ("eager", "measured"),
        ("eager", "measured"),
    ]


def test_conformance_runs_the_kind_s_cases(here, linear_offer) -> None:
    for factory, conformant in ((TorchLinearBackend, True), (WritesNoState, False)):
        (entrant,), _ = find_entrants(
            small("gdn"), here, [linear_offer(factory)], Policy(), phases=("decode",)
        )
        check = check_conformance(entrant, "cpu", 20.0)
        assert (check.conformant, check.failure[:3]) == (conformant, "" if conformant else "gdn")
        assert check.cases > 10


@pytest.mark.parametrize("kind", ["gdn", "mamba2", "kda", "mamba1", "lightning"])
def test_costs(kind) -> None:
    request, work = small(kind), Workload.parse("extend:bs=2,new=5,prefix=7")
    cost = cost_of(work, request)
    heads, k_heads, dim = 4, request.num_kv_heads, 16
    v_dim = 1 if kind == "mamba1" else 8
    operations = 7 if kind in ("gdn", "kda") else 5
    assert cost.flops == 10 * operations * heads * dim * v_dim
    states = 2 * 2 * heads * dim * v_dim * 4
    token = 2 * (2 * k_heads * dim + 2 * heads * v_dim)
    token += 4 * heads * (dim if kind in ("kda", "mamba1") else 1)
    token += 0 if kind == "lightning" else 2 * heads
    assert cost.nbytes == states + 10 * token
    fresh = cost_of(Workload.parse("extend:bs=2,new=5"), request)
    assert fresh.nbytes == cost.nbytes - states // 2
    drafts = cost_of(Workload.parse("verify:bs=2,new=5,prefix=7"), request)
    assert drafts.flops == cost.flops
    assert drafts.nbytes == cost.nbytes + 4 * states // 2


def test_the_default_grid_has_each_size_once(here) -> None:
    grid = default_grid(small("gdn"), here, 2)
    assert len({(each.batch_size, each.new) for each in grid}) == len(grid) > 3
    assert {each.phase for each in grid} == {"decode", "extend"}
    drafting = default_grid(small("gdn").replace(**CHAINS), here, 2)
    assert {each.new for each in drafting if each.phase == "verify"} == {4}
    assert [each for each in drafting if each.phase != "verify"] == list(grid)


def call(*args: str):
    return CliRunner().invoke(verbs, args, prog_name="attnmux")


def answer(*args: str) -> dict:
    result = call(*args)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def model(tmp_path):
    config = {
        **{"model_type": "qwen3_next", "num_hidden_layers": 4, "full_attention_interval": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "torch_dtype": "bfloat16"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(tmp_path)


def test_kept_figures_change_the_choice_for_a_model(
    install, linear_offer, make_offer, known_ceilings, model, tmp_path, monkeypatch
) -> None:
    """The slower one is the first by its name, and both have one prior."""
    from attnmux.testing import FakeBackend  # noqa: PLC0415  # attention, for the model alone

    file = tmp_path / "measurements.json"
    monkeypatch.setenv("ATTNMUX_MEASUREMENTS", str(file))
    install(make_offer(FakeBackend), linear_offer(Slow), linear_offer(TorchLinearBackend))

    def chosen() -> str:
        parts = answer("select", "--model", model, "--json")["parts"]
        return parts["linear_layers"]["gdn"]["decode"]["backend"]

    assert chosen() == "Slow"
    asked = ("--model", model, "--request", "kind=gdn,num_q_heads=4,num_kv_heads=2")
    data = answer("bench", *asked, *QUICK, "--keep", *VERB_STEPS)
    (decode, _) = data["margins"]
    assert (decode["fastest"], decode["next"]) == ("fakes/TorchLinearBackend", "fakes/Slow")
    assert decode["ratio"] > 1.2
    assert {each["conformant"] for each in data["kept"]["checks"]} == {True}
    assert len(Measurement.read(file).found) == 4
    assert chosen() == "TorchLinearBackend"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--request", FIELDS, "--workload", "verify:bs=2,new=3"), "one of decode and extend"),
        (("--request", "kind=gdn,dtype=bf16,head_dim=16", "--keep"), "no num_q_heads"),
        (("--request", "kind=conv,dtype=bf16", "--keep"), "kind=conv to keep"),
    ],
)
def test_refusals(install, linear_offer, known_ceilings, args, said) -> None:
    install(linear_offer(TorchLinearBackend))
    result = call("bench", *args, *QUICK)
    assert result.exit_code == 2, result.output
    assert said in result.stderr


def test_a_kind_that_the_model_has_not(install, linear_offer, known_ceilings, model) -> None:
    install(linear_offer(TorchLinearBackend))
    result = call("bench", "--model", model, "--request", "kind=kda", *QUICK)
    assert result.exit_code == 2
    assert "a kind of the model's linear layers: gdn" in result.stderr


def test_the_table_says_what_was_timed(install, linear_offer, known_ceilings) -> None:
    install(linear_offer(TorchLinearBackend))
    result = call("bench", "--request", FIELDS, *QUICK[:2], *VERB_STEPS)
    assert result.exit_code == 0, result.output
    assert "gdn, 4/2 heads of 16 x 16, bfloat16" in " ".join(result.stdout.split())
