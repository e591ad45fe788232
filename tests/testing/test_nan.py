"""NaN in one request's Q, K and V stays within the request.

`flex_attention` runs these cases in `test_flex_attention`, next to those that compile the same
kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnmux.core import AttentionCall, ForwardBatch, KVPool
from attnmux.testing import (
    Candidate,
    Case,
    FakeBackend,
    decode,
    extend,
    fake_card,
    fake_platform,
    find_candidate,
    run_case,
    standard_cases,
)

AFTER = decode(20, 31, 5)
CROSS = extend((0, 5), (0, 9), (7, 3), encoder=(12, 4, 30))


def cases(page: int) -> dict[str, Case]:
    """The suite's, one with a window pool and one with cross-attention."""
    found = [case for case in standard_cases((page,)) if case.nan_request is not None]
    extra: dict[str, Any] = {"nan_request": 1, "page_size": page}
    windows: dict[str, Any] = {"windows": (None, 8), "window_pool": True}
    found += [
        Case(name="window-pool", steps=(decode(45, 17, 3), AFTER), **windows, **extra),
        Case(name="cross", steps=(CROSS, CROSS.varied(128)), **extra),
    ]
    return {case.name.removesuffix(f"-page{page}"): case for case in found}


class LoadsWholePages(FakeBackend):
    """Gives the rest of each page weight 0."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        super().init_forward_metadata(batch)
        pool, table = self.context.token_to_kv_pool, self.context.req_to_token_pool.req_to_token
        for row, length in zip(batch.req_pool_indices.tolist(), batch.seq_lens, strict=True):
            pages = torch.unique(table[row, :length].long() // pool.page_size)
            slots = pages.unsqueeze(1) * pool.page_size + torch.arange(pool.page_size)
            buffer = pool.get_value_buffer(self.context.layers[0].layer_id)
            self.spoilt = not bool(buffer[slots.flatten()].isfinite().all())
            if self.spoilt:
                return

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        result = super().forward_decode(call, batch)
        return result.fill_(torch.nan) if self.spoilt else result


class MixesRequests(FakeBackend):
    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        result = super().forward_extend(call, batch)
        return result.add_(0 * call.q.sum())


class KeepsAWorkspace(FakeBackend):
    left = 0.0

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        self.left = float(call.q.sum())
        return super().forward_extend(call, batch)

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return super().forward_decode(call, batch).add_(0 * self.left)


def faked(backend: type[FakeBackend]) -> Candidate:
    return Candidate(card=fake_card(), platform=fake_platform(), factory=backend)


def candidate_of(name: str) -> Candidate:
    if name == "torch_native":
        return find_candidate(name, device="cpu")
    return faked(FakeBackend if name == "fake" else LoadsWholePages)


PLACES = [(name, page) for name in ("fake", "whole pages", "torch_native") for page in (1, 16)]


@pytest.mark.parametrize(
    ("name", "page", "case"), [(*place, case) for place in PLACES for case in cases(place[1])]
)
@pytest.mark.turns(2)
def test_a_correct_backend_passes(name: str, page: int, case: str) -> None:
    candidate = candidate_of(name)
    outcome = run_case(candidate, cases(page)[case])
    if "fp4" in case and name != "torch_native":
        assert {reason.axis for reason in outcome.reasons} == {"kv_dtype"}
    else:
        assert outcome.status == "passed", (outcome.message, outcome.reasons)


def test_the_next_owner_of_the_pages_gets_them_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases(16)["extend-nan"]
    monkeypatch.setattr(KVPool, "zero", lambda *_: None)
    outcome = run_case(faked(LoadsWholePages), case)
    assert outcome.message.startswith("step 2, DECODE: layer 1, output")


@pytest.mark.parametrize(
    ("backend", "place"), [(MixesRequests, "step 1, EXTEND"), (KeepsAWorkspace, "step 2, DECODE")]
)
def test_a_leak_to_other_requests_fails(backend: type[FakeBackend], place: str) -> None:
    outcome = run_case(faked(backend), cases(16)["extend-nan"])
    assert outcome.message.startswith(f"{place}: layer 1, output")
