"""Layers on the kernels for Hopper GPUs, which are emulated here: what they compute, no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnmux.core import Platform
from attnmux.testing import Candidate
from attnmux.testing.cases.case import decode, verify
from attnmux.testing.run.runner import run_case
from attnmux.triton.plugin import TRITON

pytest.importorskip("triton")

from attnmux.emulators.gluon import emulated
from attnmux.triton.attention import shares
from attnmux.triton.attention.backend import TritonBackend
from attnmux.triton.kernels import latent_merge
from attnmux.triton.launches import dispatch


def candidate(units=3):
    """units: by default so few that requests are split and programs take several."""
    return Candidate(
        card=replace(TRITON, requires=(), factory="attnmux.triton.attention.factory:triton"),
        platform=Platform.parse("nvidia:sm90,cuda=13.0"),
        device="cpu",
        factory=lambda context, options: TritonBackend(context, options, compute_units=units),
    )


SHARES, TILES = "attend_shares", "attend_hopper_tiles"
LATENT_SHARES, LATENT_TILES = "attend_latent", "attend_latent_tiles"
KERNELS = {
    "decode-uneven": {SHARES},
    "decode-dim-64": {SHARES},
    "decode-dim-256": {SHARES},
    "decode-dims-192-128": {SHARES},
    "decode-window-pool-padding": {SHARES},
    "decode-sinks-lse-of-nothing": {SHARES},
    "decode-window-cap": {SHARES},
    "decode-deterministic": {SHARES},
    "decode-cross": {SHARES},
    "decode-fp8_e4m3-scales-lse": {SHARES},
    "decode-fp8_e5m2-dim-64": {SHARES},
    "decode-nan": {SHARES},
    "verify-chain": {SHARES},
    "verify-empty-prefix": {SHARES},
    "extend-prefix": {TILES},
    "extend-window-pool-shared-prefix": {TILES},
    "extend-chunk": {TILES},
    "extend-cap": {TILES},
    "extend-sinks-lse": {TILES},
    "extend-14x2-heads": {TILES},
    "extend-dim-64": {TILES},
    "extend-dim-256": {TILES},
    "extend-dims-192-128": {TILES},
    "extend-float16": {TILES},
    "extend-padding": {TILES},
    "extend-cross": {TILES},
    "extend-nan": {TILES},
    "mixed": {TILES},
    "strided-extend": {TILES},
    "mla-decode-padding": {LATENT_SHARES},
    "mla-decode-128-heads": {LATENT_SHARES},
    "mla-verify-chain": {LATENT_SHARES},
    "mla-extend": {LATENT_TILES},
    "mla-extend-nan": {LATENT_TILES},
    "mla-unsaved": {LATENT_TILES},
    "strided-mla-extend": {LATENT_TILES},
    "mla-expanded-chunk": {TILES},
}
"""The kernels of cases of the suite."""
CASES = {case.name.removesuffix("-page16"): case for case in candidate().cases((16,))}
DIMS = {
    "decode-uneven": 80,
    "decode-sinks-lse-of-nothing": 96,
    "decode-fp8_e4m3-scales-lse": 112,
    "decode-fp8_e5m2-dim-64": 256,
    "decode-deterministic": 80,
    "verify-chain": 256,
}
"""Cases of the suite, and columns that it has no such case for."""


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.turns(12)
def test_agrees_with_reference(name, run_emulated):
    run_emulated(CASES[name], KERNELS[name])


@pytest.mark.parametrize("name", DIMS)
def test_agrees_for_other_dims(name, run_emulated):
    case = replace(CASES[name], head_dim=DIMS[name], v_head_dim=DIMS[name])
    run_emulated(case, KERNELS[name])


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("verify-chain", verify(4, 2600, 300)),
        ("verify-chain", verify(8, 2600, 300)),
        ("decode-deterministic", decode(2600, 300)),
    ],
)
@pytest.mark.parametrize("most_turns", [0, 100])
@pytest.mark.turns(2)
def test_merges_many_parts(name, step, most_turns, run_emulated, monkeypatch):
    """In two steps, and in one."""
    monkeypatch.setattr(shares, "MOST_TURNS", most_turns)
    case = replace(
        CASES[name], steps=(step,), num_q_heads=4, num_kv_heads=1, max_context_len=3072, lse=True
    )
    run_emulated(case, {SHARES}, units=8)


@pytest.fixture
def run_emulated(monkeypatch):
    monkeypatch.setattr(dispatch, "can_compile", lambda address: True)
    # The interpreter runs one launch after the other.
    monkeypatch.setattr(latent_merge, "gdc_wait", lambda: None)

    def run(case, kernels, units=3):
        with emulated() as launched:
            outcome = run_case(candidate(units), case)
        assert outcome.status == "passed", outcome.message or outcome.reasons
        assert kernels <= set(launched)

    return run
