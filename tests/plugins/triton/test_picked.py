"""Sparse MLA through Triton's interpreter: the suite's cases of kind "nsa"."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnmux.core import AttnmuxError, InvalidInput, Platform
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    Case,
    decode,
    extend,
    make_setup,
    prepare_step,
)
from attnmux.testing.reference import attention
from attnmux.triton.plugin import TRITON

pytest.importorskip("triton")

from attnmux.triton.attention import picked
from attnmux.triton.attention.picked import PickedBackend

CANDIDATE = Candidate(
    card=replace(
        TRITON,
        requires=(),
        clauses=tuple(each for each in TRITON.clauses if "nsa" in str(each.kind)),
    ),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    # Few enough that some steps' picks are in one part, and so many that others' are shared.
    factory=lambda context, options: PickedBackend(context, options, compute_units=64),
)


class TestPicked(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (16,)


class TestPickedAtPageOne(AttentionBackendTests):
    """The kernel sees slots alone."""

    backend = CANDIDATE
    page_sizes = (1,)
    executions = ("eager",)

    def wants(self, case: Case) -> bool:
        return case.name in {"nsa-decode-page1", "nsa-extend-page1"}


SPARSE = {
    "kind": "nsa",
    "num_kv_heads": 1,
    "num_q_heads": 20,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "head_dim": 48,
    "page_size": 4,
    "max_context_len": 640,
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("topk", [130, 300])
@pytest.mark.turns(2)
def test_parts_of_a_tokens_picks(monkeypatch, topk, deterministic):
    """As where a device has more units than a step has tokens."""
    monkeypatch.setattr(picked, "ALIKE_KEYS", 64)
    steps = decode(200, 3, 129), extend((150, 5), (200, 0))
    case = Case(
        name="parts", steps=steps, index_topk=topk, lse=True, deterministic=deterministic, **SPARSE
    )
    setup = make_setup(case, CANDIDATE.platform, "cpu")
    backend = PickedBackend(setup.context, {}, compute_units=10_000)
    for lengths in steps:
        step = prepare_step(setup, lengths)
        backend.init_forward_metadata(step.batch)
        for given in step.inputs:
            step.batch.topk_indices.copy_(given.topk_indices)
            lse = torch.empty(given.q.shape[:2])
            out = backend.forward(
                given.q, given.k, given.v, given.layer, step.batch,
                q_rope=given.q_rope, k_rope=given.k_rope, lse=lse,
            )  # fmt: skip
            expected, expected_lse = attention(
                given.q,
                given.layer,
                step.batch,
                setup.context.req_to_token_pool.req_to_token,
                setup.context.token_to_kv_pool,
                q_rope=given.q_rope,
            )
            torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)
            torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-3, atol=1e-3)


def test_refusals():
    case = Case(name="refused", steps=(decode(9),), index_topk=4, **SPARSE)
    setup = make_setup(case, CANDIDATE.platform, "cpu")
    backend = PickedBackend(setup.context, {}, compute_units=4)
    step = prepare_step(setup, decode(9))
    given = step.inputs[0]
    call = {"q_rope": given.q_rope, "k_rope": given.k_rope}
    with pytest.raises(AttnmuxError, match="no step is prepared"):
        backend.forward(given.q, given.k, None, given.layer, step.batch, **call)
    backend.init_forward_metadata(step.batch)
    unpicked = replace(step.batch, topk_indices=None)
    with pytest.raises(InvalidInput, match="topk_indices: expected the keys that the indexer"):
        backend.forward(given.q, given.k, None, given.layer, unpicked, **call)
