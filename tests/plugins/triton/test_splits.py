"""Tiles whose keys are shared by programs, in extend steps and verification: the suite's cases, and
how many programs share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnmux.core import Platform
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    Case,
    decode,
    extend,
    make_setup,
    prepare_step,
)
from attnmux.triton.plugin import TRITON

pytest.importorskip("triton")

from attnmux.triton.attention import splits
from attnmux.triton.attention.backend import TritonBackend
from attnmux.triton.attention.splits import num_splits
from attnmux.triton.launches.config_tables import ConfigTables
from attnmux.triton.launches.configs import ConfigEntry, TileConfig

UNITS = 24
CASES = {
    "extend-chunk",
    "extend-cross",
    "extend-fp8_e4m3-scales-lse",
    "extend-in-chunks-host-lens",
    "extend-multi-item",
    "extend-nan",
    "extend-nothing-new",
    "extend-padding-host-lens",
    "extend-prefix-host-lens",
    "extend-sinks-lse",
    "extend-window-cap",
    "mla-extend",
    "strided-extend",
}
"""One of each feature that extend steps have."""
VERIFIED = {
    "decode-and-verify",
    "strided-verify-chain",
    "verify-and-decode",
    "verify-chain",
    "verify-chain-host-lens",
    "verify-empty-prefix",
    "verify-fp8_e4m3-scales",
    "verify-larger-than-graphs",
    "verify-long",
    "verify-padding",
    "verify-tree",
    "verify-window-pool",
}
IN_TILES = ConfigTables(
    own_chains=(ConfigEntry(config=TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=2)),)
)
SM90 = Platform.parse("nvidia:sm90,cuda=13.0")


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch):
    monkeypatch.setattr(splits, "LEAST_KEYS", 32)


class TestTritonInSplits(AttentionBackendTests):
    backend = Candidate(
        card=replace(TRITON, requires=(), factory="attnmux.triton.attention.factory:triton"),
        platform=SM90,
        device="cpu",
        factory=lambda context, options: TritonBackend(context, options, compute_units=UNITS),
    )
    page_sizes = (16,)
    executions = ("eager",)

    def wants(self, case: Case) -> bool:
        return case.name.removesuffix("-page16") in CASES


class TestVerificationInTiles(AttentionBackendTests):
    """Chains of drafts of any number of rows; trees and masks stay in shares."""

    backend = Candidate(
        card=TestTritonInSplits.backend.card,
        platform=SM90,
        device="cpu",
        factory=lambda context, options: TritonBackend(
            context, options, compute_units=UNITS, tables=IN_TILES
        ),
    )
    page_sizes = (16,)

    def wants(self, case: Case) -> bool:
        return case.name.removesuffix("-page16") in VERIFIED


def test_every_name_is_a_case():
    names = {case.name.removesuffix("-page16") for case in TestTritonInSplits.backend.cases((16,))}
    assert names >= CASES | VERIFIED


def kernels(step, units, **options):
    """The names of the kernels that a step launches."""
    case = Case(name="of-this-test", max_context_len=4096, steps=(step,), **options)
    setup = make_setup(case, SM90, "cpu")
    backend = TritonBackend(setup.context, {}, compute_units=units)
    made = prepare_step(setup, step, host_lens=case.host_lens)
    given = made.inputs[0]

    def run():
        backend.init_forward_metadata(made.batch)
        backend.forward(given.q, given.k, given.v, given.layer, made.batch)

    return {launch.bound.kernel.__name__ for launch in backend.launcher.rehearse(run)}


@pytest.mark.parametrize(
    ("step", "units", "options", "is_split"),
    [
        (extend((2000, 3)), UNITS, {}, True),
        (extend((2000, 3)), 2, {}, False),
        (extend((20, 3)), UNITS, {"host_lens": True}, False),
        (extend((2000, 3)), UNITS, {"deterministic": True}, False),
        (decode(2000), UNITS, {}, False),
    ],
)
def test_few_tiles_of_long_requests_are_split(step, units, options, is_split):
    assert ("merge_splits" in kernels(step, units, **options)) == is_split


@pytest.mark.parametrize(
    ("tiles", "units", "keys", "expected"),
    [
        (16, 132, 131_072, 8),
        (16, 132, 1_024, 2),
        (16, 132, 1_000, 1),
        (1, 132, 131_072, 29),
        (70, 132, 131_072, 7),
        (106, 132, 131_072, 1),
        (4, 0, 131_072, 1),
    ],
)
def test_enough_programs_share_a_tile_to_fill_the_device(monkeypatch, tiles, units, keys, expected):
    monkeypatch.setattr(splits, "LEAST_KEYS", 512)
    assert num_splits(tiles, units, keys) == expected
