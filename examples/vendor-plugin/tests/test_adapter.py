"""What the conformance suite cannot know: the adapter's own options and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from acme_attnmux import driver
from acme_attnmux.plugin import PAGED, attnmux_platforms
from attnmux.core import (
    AttentionBackend,
    AttnmuxError,
    GraphUnsupported,
    InvalidInput,
    MultiItem,
    Platform,
    SpecInput,
)
from attnmux.testing import (
    Candidate,
    Case,
    CaseSetup,
    PreparedStep,
    Step,
    decode,
    extend,
    make_setup,
    prepare_step,
    run_case,
    verify,
)

M2 = Platform.parse("acme:m2,device=cpu,runtime=acmert 3.1,features=fp8")
CANDIDATE = Candidate(card=PAGED, platform=M2)


def prepared(step: Step, spec_topk: int | None = None) -> tuple[AttentionBackend, PreparedStep]:
    setup: CaseSetup = make_setup(
        Case(name="own", steps=(step,), page_size=16, spec_topk=spec_topk), M2, "cpu"
    )
    return CANDIDATE.build(setup.context), prepare_step(setup, step)


@pytest.mark.parametrize("keys_per_step", [64, 128, 256])
def test_an_option_changes_no_result(keys_per_step: int) -> None:
    candidate = replace(CANDIDATE, options={"keys_per_step": keys_per_step})
    cases = [
        Case(name="long", steps=(decode(1100, 5, 64),), page_size=page, max_context_len=1152)
        for page in (16, 64)
    ]
    for case in cases:
        assert run_case(candidate, case).status == "passed"


def test_a_mask_and_items_are_refused_before_a_step() -> None:
    backend, step = prepared(verify(4, 9, 30), spec_topk=4)
    assert step.batch.spec_info is not None
    with pytest.raises(InvalidInput, match="custom_mask"):
        backend.init_forward_metadata(step.batch)
    backend, step = prepared(extend((0, 5)))
    lens = step.batch.seq_lens
    items = MultiItem(prefix_lens=lens, token_pos_in_items=step.batch.positions.int())
    with pytest.raises(InvalidInput, match="multi_item"):
        backend.init_forward_metadata(replace(step.batch, multi_item=items))


def test_lengths_that_are_missing_are_named() -> None:
    backend, step = prepared(extend((0, 5)))
    with pytest.raises(InvalidInput, match="extend_seq_lens"):
        backend.init_forward_metadata_out_graph(replace(step.batch, extend_seq_lens=None))
    backend, step = prepared(verify(4, 9, 30), spec_topk=1)
    with pytest.raises(InvalidInput, match="spec_info"):
        backend.init_forward_metadata_out_graph(replace(step.batch, spec_info=None))


def test_keys_that_no_page_holds_are_refused() -> None:
    backend, step = prepared(extend((0, 5)))
    backend.init_forward_metadata(step.batch)
    given = step.inputs[0]
    with pytest.raises(InvalidInput, match="pages alone"):
        backend.forward(given.q, given.k, given.v, given.layer, step.batch, save_kv_cache=False)


def test_a_layer_without_a_step_and_a_capture_without_buffers_are_refused() -> None:
    backend, step = prepared(decode(9, 30))
    given = step.inputs[0]
    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        backend.forward(given.q, given.k, given.v, given.layer, step.batch)
    backend.init_cuda_graph_state(1, 1)
    with pytest.raises(GraphUnsupported, match="a batch of 2"):
        backend.init_forward_metadata_out_graph(step.batch, in_capture=True)


def test_a_chain_of_drafts_needs_no_mask() -> None:
    backend, step = prepared(verify(4, 9, 30), spec_topk=1)
    chain = replace(step.batch, spec_info=SpecInput(draft_token_num=4))
    backend.init_forward_metadata(chain)
    given = step.inputs[0]
    out = backend.forward(given.q, given.k, given.v, given.layer, chain)
    assert out.shape == given.q.shape


@pytest.mark.parametrize("generation", driver.GENERATIONS)
def test_the_probe_reports_what_the_driver_does(
    generation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACME_SIMULATOR", generation)
    (platform,) = attnmux_platforms()
    assert (platform.vendor, platform.arch, platform.count) == ("acme", generation, 1)
    assert ("fp8" in platform.features) is (generation == "m2")
    monkeypatch.delenv("ACME_SIMULATOR")
    assert attnmux_platforms() == []
    monkeypatch.setenv("ACME_SIMULATOR", "m9")
    with pytest.raises(ValueError, match="m1 or m2"):
        attnmux_platforms()
