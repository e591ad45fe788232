"""One backend for prefill and another for decode."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import BackendContext, ForwardMode, InvalidInput
from attnmux.core.composites.dispatch import HybridAttnBackend
from attnmux.testing import (
    Candidate,
    Case,
    FakeBackend,
    decode,
    extend,
    fake_card,
    fake_platform,
    make_setup,
    prepare_step,
    run_case,
    standard_cases,
    verify,
)


class Child(FakeBackend):
    """Notes what it is asked for."""

    def __init__(self, context: BackendContext) -> None:
        super().__init__(context)
        self.calls: list[str] = []

    def init_forward_metadata_out_graph(self, batch, in_capture=False) -> None:
        self.calls.append(f"out_graph {in_capture}")
        super().init_forward_metadata_out_graph(batch, in_capture)

    def init_forward_metadata_in_graph(self, batch) -> None:
        self.calls.append("in_graph")
        super().init_forward_metadata_in_graph(batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.calls.append(f"graph_state {max_bs} {max_num_tokens}")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 7

    def save_kv(self, *args, **kwargs) -> None:
        self.calls.append("save_kv")
        super().save_kv(*args, **kwargs)

    def forward_decode(self, call, batch) -> torch.Tensor:
        self.calls.append("forward_decode")
        return super().forward_decode(call, batch)

    def forward_extend(self, call, batch) -> torch.Tensor:
        self.calls.append("forward_extend")
        return super().forward_extend(call, batch)


STEPS = {
    ForwardMode.EXTEND: extend((3, 5)),
    ForwardMode.MIXED: extend((3, 5), (6, 1), mode=ForwardMode.MIXED),
    ForwardMode.DECODE: decode(4, 9),
    ForwardMode.TARGET_VERIFY: verify(3, 8),
    ForwardMode.DRAFT_EXTEND: extend((8, 2), mode=ForwardMode.DRAFT_EXTEND),
    ForwardMode.IDLE: extend(mode=ForwardMode.IDLE),
}
SPECULATIVE = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


def hybrid_of(mode: ForwardMode, speculative: str, topk: int | None = 1):
    case = Case(name="hybrid", steps=(STEPS[mode],), page_size=4, spec_topk=topk)
    setup = make_setup(case, fake_platform(), "cpu")
    request = setup.context.request.replace(speculative_attention_mode=speculative)
    context = replace(setup.context, request=request)
    backend = HybridAttnBackend(prefill=Child(context), decode=Child(context))
    return backend, prepare_step(setup, STEPS[mode])


@pytest.mark.parametrize("speculative", ["prefill", "decode"])
@pytest.mark.parametrize("mode", STEPS)
def test_a_step_goes_to_the_backend_of_its_phase(mode: ForwardMode, speculative: str) -> None:
    backend, step = hybrid_of(mode, speculative)
    if mode in SPECULATIVE:
        serving = backend.decode if speculative == "decode" else backend.prefill
    else:
        serving = backend.decode if mode.is_decode_or_idle() else backend.prefill
    assert backend.select(mode) is serving
    backend.init_forward_metadata(step.batch)
    given = step.inputs[0]
    backend.forward(given.q, given.k, given.v, given.layer, step.batch)
    idle = backend.prefill if serving is backend.decode else backend.decode
    assert idle.calls == []
    prepared = ["out_graph False", "in_graph"]
    method = "forward_decode" if mode.is_decode() else "forward_extend"
    ran = [] if mode is ForwardMode.IDLE else ["save_kv", method]
    assert serving.calls == [*prepared, *ran]


def test_halves_and_capture_reach_the_child() -> None:
    backend, step = hybrid_of(ForwardMode.DECODE, "prefill")
    backend.init_forward_metadata_out_graph(step.batch, in_capture=True)
    backend.init_forward_metadata_in_graph(step.batch)
    assert backend.decode.calls == ["out_graph True", "in_graph"]
    assert backend.get_cuda_graph_seq_len_fill_value() == 7


@pytest.mark.parametrize(
    ("speculative", "topk", "captured"),
    [("prefill", None, False), ("prefill", 1, True), ("decode", 1, False)],
)
def test_prefill_is_captured_only_where_it_verifies(speculative, topk, captured) -> None:
    backend, _ = hybrid_of(ForwardMode.DECODE, speculative, topk)
    backend.init_cuda_graph_state(8, 32)
    assert backend.decode.calls == ["graph_state 8 32"]
    assert backend.prefill.calls == (["graph_state 8 32"] if captured else [])


def test_children_share_a_context() -> None:
    case = Case(name="hybrid", steps=(decode(4),), page_size=4)
    one, other = (FakeBackend(make_setup(case, fake_platform(), "cpu").context) for _ in "ab")
    with pytest.raises(InvalidInput, match="prefill: expected backends of one context"):
        HybridAttnBackend(prefill=one, decode=other)


def test_what_prefill_writes_decode_reads() -> None:
    def make(context: BackendContext, _: object) -> HybridAttnBackend:
        return HybridAttnBackend(prefill=FakeBackend(context), decode=FakeBackend(context))

    candidate = Candidate(card=fake_card(), platform=fake_platform(), factory=make)
    both = [case for case in standard_cases((16,)) if len({step.mode for step in case.steps}) > 1]
    assert len(both) > 5
    for case in both:
        outcome = run_case(candidate, case)
        assert outcome.status == "passed", f"{case.name}: {outcome.message}"
