"""Timed steps: their inputs, the check of answers, failures, and conformance."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from attnmux.core import ForwardMode, InvalidInput, NoBackend, Offer, Policy, Request
from attnmux.core.facts.errors import UnknownBackend
from attnmux.core.plugin import NONE, one_of
from attnmux.testing import (
    Candidate,
    FakeBackend,
    GraphFakeBackend,
    RecordingGraphs,
    cases_in_shape,
    errors_between,
    fake_card,
    fake_platform,
    graph_card,
    reference,
)
from attnmux.testing.bench import answers, conformance, subjects
from attnmux.testing.bench.answers import error_of
from attnmux.testing.bench.conformance import check_conformance
from attnmux.testing.bench.entrants import find_entrants, make_field
from attnmux.testing.bench.measuring import Bench
from attnmux.testing.bench.roofline import Ceilings, cost_of
from attnmux.testing.bench.shapes import completed
from attnmux.testing.bench.steps import make_step
from attnmux.testing.bench.timing import median_us
from attnmux.testing.bench.workload import Workload
from attnmux.testing.graphs.tape import GraphViolation

HERE = fake_platform()
CPU = torch.device("cpu")
REACHED = Ceilings(read_gbs=10.0, matmul_tflops=1.0)
PLAIN = Request(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype="bfloat16")
DECODE, EXTEND = Workload.parse("decode:bs=3,ctx=21"), Workload.parse("extend:bs=2,new=5,prefix=7")

REQUESTS = {
    "plain": PLAIN,
    "float32": PLAIN.replace(dtype="float32"),
    "v_head_dim": PLAIN.replace(v_head_dim=8),
    "window": PLAIN.replace(sliding_window=4),
    "chunk": PLAIN.replace(attention_chunk=6),
    "cap": PLAIN.replace(logit_cap=3.0),
    "sinks": PLAIN.replace(sinks=True),
    "alibi": PLAIN.replace(alibi=True),
    "relative": PLAIN.replace(relative_bias=True),
    "lse": PLAIN.replace(lse=True),
    "fp8": PLAIN.replace(kv_dtype="fp8_e4m3"),
    "page": PLAIN.replace(page_size=16),
    "mla": completed(Request(kind="mla", num_q_heads=8)),
}


class Wrong(FakeBackend):
    """Loses the first key of every request."""

    def visible(self, *args, **kwargs):
        keep = super().visible(*args, **kwargs)
        keep[:, 0] = False
        return keep


class WrongInHead(FakeBackend):
    """Answers one of the sampled heads with another's."""

    def attend(self, *args, **kwargs):
        out, lse = super().attend(*args, **kwargs)
        out[:, 1] = out[:, 0]
        return out, lse


class NaN(FakeBackend):
    def attend(self, *args, **kwargs):
        out, lse = super().attend(*args, **kwargs)
        return out * torch.nan, lse


class Crashing(FakeBackend):
    """Fails once it is timed."""

    runs = 0

    def forward_decode(self, call, batch):
        self.runs += 1
        if self.runs > 3 * len(self.context.layers):
            raise RuntimeError("an illegal memory access was encountered\nand much more")
        return super().forward_decode(call, batch)


class Missing(FakeBackend):
    def __init__(self, context, options=None) -> None:
        raise ImportError("libkernels.so: cannot open shared object file")


class Reads(GraphFakeBackend):
    """Reads a length on the host, which no graph repeats."""

    def forward_decode(self, call, batch):
        batch.seq_lens.tolist()
        return super().forward_decode(call, batch)


@pytest.fixture(autouse=True)
def _importable(monkeypatch, request) -> None:
    monkeypatch.setitem(sys.modules, __name__, request.module)


def offer(name: str, factory: type | None = None, card=None, **conditions) -> Offer:
    card = card or (graph_card if factory in (GraphFakeBackend, Reads) else fake_card)
    made = replace(card(**conditions), name=name)
    if factory is not None:
        module = __name__ if factory.__module__ == __name__ else factory.__module__
        made = replace(made, factory=f"{module}:{factory.__name__}")
    return Offer(card=made, plugin="fakes", version="1")


def rows(offers, workloads=(DECODE, EXTEND), request=PLAIN, graphs=None):
    entrants, _ = find_entrants(request, HERE, offers, Policy(), graphs=graphs is not None)
    bench = Bench(device=CPU, ceilings=REACHED, graphs=graphs, seconds=0.003)
    return list(bench.rows(workloads, entrants))


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.turns(2)
def test_a_right_answer_is_timed(name) -> None:
    found = rows([offer("right")], request=REQUESTS[name])
    assert [(row.status, row.workload, row.why) for row in found] == [
        ("measured", DECODE, ""),
        ("measured", EXTEND, ""),
    ]
    for row in found:
        assert row.median_us > 0
        assert row.prepare_us > 0
        assert row.error < 5e-3
        assert row.backend == "fakes/right"
        decided = REQUESTS[name].replace(kv_dtype=REQUESTS[name].kv_dtype or REQUESTS[name].dtype)
        assert row.cost == cost_of(row.workload, decided)
        assert row.share == pytest.approx(REACHED.share(row.cost, row.median_us))
        assert row.median_us == pytest.approx(sorted(row.rounds_us)[1])


def test_the_bench_says_what_it_compiles_and_times() -> None:
    said = []
    entrants, _ = find_entrants(PLAIN, HERE, [offer("a"), offer("b")], Policy())
    bench = Bench(device=CPU, ceilings=REACHED, seconds=0.003, say=said.append)
    assert len(list(bench.rows([DECODE], entrants))) == 2
    assert said[:3] == [
        f"filling the pool of {DECODE}",
        f"compiling fakes/a for {DECODE}",
        f"compiling fakes/b for {DECODE}",
    ]
    assert said[3:] == [f"timing fakes/{name} on {DECODE}" for name in "abbaab"]


@pytest.mark.parametrize("factory", [Wrong, WrongInHead, NaN])
def test_a_wrong_answer_is_not_timed(factory) -> None:
    for row in rows([offer("wrong", factory), offer("right")]):
        if row.backend == "fakes/right":
            assert row.status == "measured"
            continue
        assert (row.status, row.median_us) == ("wrong", None)
        assert row.error > 1e-2
        assert "of the norm, 1.0e-02 at most" in row.why


def test_a_failure_is_a_row_and_the_others_go_on() -> None:
    offers = [offer("crashing", Crashing), offer("missing", Missing), offer("right")]
    found = {row.backend: row for row in rows(offers, (DECODE,))}
    assert found["fakes/right"].status == "measured"
    assert found["fakes/crashing"].status == "failed"
    assert found["fakes/crashing"].why == ("RuntimeError: an illegal memory access was encountered")
    assert found["fakes/missing"].status == "failed"
    assert "libkernels.so" in found["fakes/missing"].why


def test_a_pool_too_large_for_memory(monkeypatch) -> None:
    def full(*args, **kwargs):
        raise MemoryError("no room")

    monkeypatch.setattr(subjects, "make_step", full)
    (row,) = rows([offer("right")], (DECODE,))
    assert (row.status, row.why) == ("failed", "MemoryError: no room")


def test_decode_is_timed_from_a_graph_where_the_card_declares_them() -> None:
    found = rows([offer("in", GraphFakeBackend), offer("out")], graphs=RecordingGraphs())
    said = {(row.backend, row.workload.phase): (row.status, row.execution) for row in found}
    assert said == {
        ("fakes/in", "decode"): ("measured", "graph"),
        ("fakes/out", "decode"): ("measured", "eager"),
        ("fakes/in", "extend"): ("measured", "eager"),
        ("fakes/out", "extend"): ("measured", "eager"),
    }


def test_a_backend_that_cannot_be_captured() -> None:
    (row,) = rows([offer("reads", Reads)], (DECODE,), graphs=RecordingGraphs())
    assert row.status == "failed"
    assert GraphViolation.__name__ in row.why


def test_backends_with_one_page_size_share_a_step(monkeypatch) -> None:
    made = []

    def noted(*args, **kwargs):
        made.append(make_step(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(subjects, "make_step", noted)
    offers = [offer("a"), offer("b"), offer("c", page_size=one_of(16))]
    found = rows(offers, (DECODE,))
    assert sorted((row.backend, row.page_size) for row in found) == [
        ("fakes/a", 1),
        ("fakes/b", 1),
        ("fakes/c", 16),
    ]
    assert [step.pool.page_size for step in made] == [1, 16]
    assert torch.equal(made[0].q, made[1].q)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("workload", [DECODE, EXTEND])
def test_a_step_in_its_pools(workload, page) -> None:
    request = PLAIN.replace(page_size=page, kv_dtype="bfloat16")
    step = make_step(workload, request, CPU)
    table, batch = step.table.req_to_token, step.batch
    slots = torch.stack([table[row, : workload.keys] for row in batch.req_pool_indices]).long()
    assert slots.unique().numel() == slots.numel()
    assert int(slots.min()) >= page
    assert batch.seq_lens.tolist() == [workload.keys] * workload.batch_size
    assert torch.equal(batch.out_cache_loc, slots[:, workload.prefix :].flatten())
    inside = slots // page * page + torch.arange(workload.keys) % page
    assert torch.equal(inside, slots)
    pages = slots[:, ::page].flatten() // page
    assert len(pages) < 3 or not torch.equal(pages, pages.sort().values)
    keys = [step.pool.get_key_buffer(layer.layer_id)[slots] for layer in step.layers]
    assert len(step.layers) >= 2
    for one, other in pairwise(keys):
        assert not torch.equal(one, other)
    for values in keys:
        assert 0.8 < float(values.float().std()) < 1.2
    again = make_step(workload, request, CPU)
    assert torch.equal(again.q, step.q)
    assert torch.equal(again.table.req_to_token, table)


def test_k_and_v_side_by_side_are_those_of_a_pool_each() -> None:
    request = PLAIN.replace(page_size=4, kv_dtype="bfloat16")
    apart = make_step(DECODE, request, CPU, num_layers=2)
    beside = make_step(DECODE, request.replace(strided_kv=True), CPU, num_layers=2)
    assert (apart.pool.is_strided, beside.pool.is_strided) == (False, True)
    for one, other in zip(apart.caches(), beside.caches(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_step_of_uneven_lengths() -> None:
    work = Workload.uneven([5, 40, 17])
    step = make_step(work, PLAIN.replace(page_size=16, kv_dtype="bfloat16"), CPU, num_layers=2)
    assert step.batch.seq_lens.tolist() == [5, 40, 17]
    assert step.batch.positions.tolist() == [4, 39, 16]
    assert step.pages.shape == (3, 3)
    assert step.pages.count_nonzero(1).tolist() == [1, 3, 2]
    assert step.slots[1, 39] == step.batch.out_cache_loc[1]
    assert step.slots[0, 5:].count_nonzero() == 0
    keys, values = step.caches()[0]
    assert keys.shape == values.shape == (7, 16, 2, 16)  # with the reserved page
    backend = FakeBackend(step.context(HERE))
    backend.init_forward_metadata(step.batch)
    assert error_of(step, step.calls_in_pool(backend)[0](), layer=0) < 5e-3
    assert error_of(step, step.calls_in_pool(backend)[0](), layer=1) > 0.1


def test_a_mixed_step() -> None:
    work = Workload.parse("extend:bs=2,new=3,prefix=4,decoding=2,ctx=9")
    step = make_step(work, PLAIN.replace(page_size=4, kv_dtype="bfloat16"), CPU, num_layers=1)
    batch = step.batch
    assert batch.forward_mode is ForwardMode.MIXED
    assert batch.seq_lens.tolist() == [7, 7, 9, 9]
    assert batch.extend_seq_lens.tolist() == [3, 3, 1, 1]
    assert batch.extend_prefix_lens.tolist() == [4, 4, 8, 8]
    assert batch.positions.tolist() == [4, 5, 6, 4, 5, 6, 8, 8]
    assert batch.out_cache_loc[7] == step.slots[3, 8]
    backend = FakeBackend(step.context(HERE))
    backend.init_forward_metadata(batch)
    out = step.calls_in_pool(backend)[0]()
    assert error_of(step, out) < 5e-3
    for wrong in (2, 7):  # the last token of a prompt, and a decoding request's
        spoilt = out.clone()
        spoilt[wrong] += 1
        assert error_of(step, spoilt) > 0.1


def test_a_sparse_step_sees_the_picked_keys() -> None:
    request = REQUESTS["mla"].replace(kind="nsa", page_size=4, kv_dtype="bfloat16")
    step = make_step(EXTEND, request, CPU, num_layers=1, topk=3, max_context_len=64)
    picks = step.batch.topk_indices
    assert picks.shape == (step.workload.num_tokens, 3)
    assert (picks <= step.batch.positions[:, None]).all()
    assert all(row.unique().numel() == 3 for row in picks)
    context = step.context(HERE)
    assert (context.max_context_len, context.request) == (64, request)
    backend = FakeBackend(context)
    backend.init_forward_metadata(step.batch)
    out = step.calls_in_pool(backend)[0]()
    assert error_of(step, out) < 5e-3
    dense = replace(step, batch=replace(step.batch, topk_indices=None))
    assert error_of(dense, out) > 0.1


def test_sampled_queries_match_the_whole_reference() -> None:
    request = PLAIN.replace(page_size=4, kv_dtype="bfloat16", sinks=True)
    step = make_step(EXTEND, request, CPU)
    layer = step.layers[-1]
    step.pool.set_kv_buffer(layer, step.batch.out_cache_loc, step.k, step.v, None, None)
    expected, _ = reference.attention(step.q, layer, step.batch, step.table.req_to_token, step.pool)
    step.out.copy_(expected)
    assert error_of(step) < 4e-3
    step.out[EXTEND.new * EXTEND.batch_size - 1] = 0
    assert error_of(step) > 0.1
    step.out[0, 0, 0] = torch.inf
    assert error_of(step) == float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errors_are_in_units_of_the_formats_rounding(dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(64, 4, 32, dtype=torch.float64, generator=generator)
    rounded = errors_between(expected.to(dtype).double(), expected, dtype)
    assert 0.2 < rounded.rms < rounded.worst < 1
    spoilt = expected.clone()
    spoilt[3, 1] *= 1 + 10 * torch.finfo(dtype).eps / 2
    found = errors_between(spoilt, expected, dtype)
    assert found.worst == pytest.approx(10)
    assert found.rms < 2
    assert found.relative == pytest.approx(found.rms * torch.finfo(dtype).eps / 2)
    spoilt[0, 0, 0] = torch.nan
    assert errors_between(spoilt, expected, dtype)[1:] == (float("inf"),) * 2
    nothing = torch.zeros_like(expected[:0])
    assert errors_between(nothing, nothing, dtype).worst == 0


def test_subnormal_vectors_are_rounded_as_the_smallest_normal_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.randn(64, 4, 32, dtype=torch.float64, generator=generator)
    expected[::2] *= torch.finfo(torch.float16).tiny / 50
    rounded = errors_between(expected.half().double(), expected, torch.float16)
    assert 0.2 < rounded.worst < 1
    spoilt = expected * 3
    assert errors_between(spoilt, expected, torch.float16).worst > 1000


def test_error_limits() -> None:
    step = make_step(DECODE, REQUESTS["fp8"].replace(page_size=1), CPU)
    assert answers.max_error(step, fp8_products=False) == 1e-2
    assert answers.max_error(step, fp8_products=True) == 1e-2 + 0.0625


BOTH = ("decode", "extend")


def test_entrants_and_refusals() -> None:
    elsewhere = offer("elsewhere", vendor=one_of("other"))
    no_extend = offer("no-extend", phase=one_of("decode"))
    offers = [offer("right"), elsewhere, no_extend, offer("sinks", sinks=NONE)]
    request = REQUESTS["sinks"]
    entrants, refused = find_entrants(request, HERE, offers, Policy(backend="right"), phases=BOTH)
    assert [(each.offer.card.name, each.phase) for each in entrants] == [
        ("right", "decode"),
        ("right", "extend"),
        ("no-extend", "decode"),
    ]
    reasons = {(each.offer.card.name, each.phase): each.why for each in refused}
    assert set(reasons) == {("no-extend", "extend"), ("sinks", "decode"), ("sinks", "extend")}
    assert reasons["sinks", "decode"].startswith("sinks: not served")
    _, refused = find_entrants(request, HERE, offers, Policy(), names=("elsewhere",), phases=BOTH)
    assert {each.offer.card.name for each in refused} == {"elsewhere"}
    with pytest.raises(UnknownBackend):
        find_entrants(request, HERE, offers, Policy(), names=("rihgt",))
    _, refused = find_entrants(
        request, HERE, [offer("right")], Policy(deny=("right",)), phases=BOTH
    )
    assert [each.reasons[0].code for each in refused] == ["DENIED", "DENIED"]


def test_a_companion_is_not_timed_for_its_backend() -> None:
    one, other = offer("one", phase=one_of("extend")), offer("other")
    one = replace(one, card=replace(one.card, companions=("other",)))
    entrants, refused = find_entrants(
        PLAIN, HERE, [one, other], Policy(), names=("one",), phases=BOTH
    )
    assert [(each.offer.card.name, each.phase) for each in entrants] == [("one", "extend")]
    assert [(each.offer.card.name, each.phase) for each in refused] == [("one", "decode")]
    assert refused[0].why.startswith("phase: asked for decode")


def test_the_request_is_not_coerced_for_a_backend() -> None:
    """A page size that the user set is not coerced for a backend that reads others."""
    asked = PLAIN.replace(page_size=16)
    entrants, refused = find_entrants(
        asked, HERE, [offer("right", page_size=one_of(64))], Policy(allow_coercion=True)
    )
    assert entrants == []
    assert {each.reasons[0].code for each in refused} == {"PAGE_SIZE"}


def test_a_field_without_backends() -> None:
    with pytest.raises(NoBackend, match="fakes/sinks: sinks: not served"):
        make_field(REQUESTS["sinks"], HERE, CPU, [offer("sinks", sinks=NONE)], Policy())
    with pytest.raises(NoBackend, match="no plugin offers one"):
        make_field(PLAIN, HERE, CPU, [], Policy())
    asked = PLAIN.replace(phases=("decode",))
    with pytest.raises(InvalidInput, match="one of decode, the request"):
        make_field(asked, HERE, CPU, [offer("right")], Policy(), workloads=[EXTEND])
    asked = PLAIN.replace(phases=("encoder",), encoder_head_dim=64)
    with pytest.raises(InvalidInput, match="phases=encoder"):
        make_field(asked, HERE, CPU, [offer("right")], Policy())
    with pytest.raises(InvalidInput, match="a device of this torch"):
        make_field(PLAIN, HERE, torch.device("xpu:7"), [offer("right")], Policy())


def test_the_field_of_a_phase() -> None:
    asked = PLAIN.replace(phases=("decode",))
    field = make_field(asked, HERE, CPU, [offer("a"), offer("b")], Policy())
    assert {each.phase for each in field.workloads} == {"decode"}
    assert field.size == 2 * len(field.workloads)
    assert field.graphs is None


def test_a_median_is_of_one_run() -> None:
    assert 900 < median_us(lambda: time.sleep(1e-3), 0.02) < 200000


def entrant_of(factory=None, request=PLAIN, phase="decode", **given):
    (entrant,), _ = find_entrants(
        request, HERE, [offer("x", factory, **given)], Policy(), phases=(phase,)
    )
    return entrant


@pytest.mark.parametrize("phase", ["decode", "extend"])
@pytest.mark.parametrize("name", ["plain", "sinks", "alibi", "fp8", "mla"])
def test_the_suite_runs_in_the_request_s_shapes(name, phase, monkeypatch) -> None:
    ran = []

    def noted(candidate, case):
        ran.append(case)
        return run_case(candidate, case)

    run_case = conformance.run_case
    monkeypatch.setattr(conformance, "run_case", noted)
    request = REQUESTS[name]
    check = check_conformance(entrant_of(request=request, phase=phase), "cpu", 0.2)
    assert check.conformant, check.failure
    assert check.passed == len(ran)
    assert check.cases > 5
    for case in ran:
        assert phase in case.phases
        assert (case.num_q_heads, case.num_kv_heads) == (request.num_q_heads, request.num_kv_heads)
        assert case.head_dim == request.head_dim
        assert case.kv_lora_rank == request.kv_lora_rank
        assert case.dtype == request.dtype
        assert case.kv_dtype == (request.kv_dtype or request.dtype)
        assert not case.request.lse
        assert not case.request.sliding_window
    if name == "sinks":
        cases = tuple(
            cases_in_shape(candidate_of(request), request, phase, page_size=16, in_graph=False)
        )
        assert any(case.sinks for case in cases)


def candidate_of(request):
    return Candidate(card=fake_card(), platform=HERE)


@pytest.mark.parametrize("phase", ["decode", "extend"])
def test_a_failing_backend_is_not_conformant(phase) -> None:
    check = check_conformance(entrant_of(Wrong, phase=phase), "cpu", 30.0)
    assert not check.conformant
    assert check.failure.startswith(f"{phase}-")


def test_one_case_runs_however_short_the_time() -> None:
    check = check_conformance(entrant_of(), "cpu", 0.0)
    assert (check.passed, check.conformant) == (1, True)
    assert check.cases > 1
