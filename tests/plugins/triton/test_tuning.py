"""The tuner, interpreted on tiny shapes, and which of its configurations are used."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest
import torch

from attnmux.core import BackendFailed, InvalidInput, Job, Platform, Request, TunedLaunch
from attnmux.core.choosing.measured.records import Device
from attnmux.testing import Case, decode, make_setup

pytest.importorskip("triton")

from attnmux.triton import tuning
from attnmux.triton.config_tables import ConfigTables
from attnmux.triton.configs import PORTABLE, ConfigQuery, ShareConfig, TileConfig
from attnmux.triton.factory import ADDRESS, triton
from attnmux.triton.plugin import TRITON
from attnmux.triton.shapes import Shape
from attnmux.triton.tuning_loads import Load, layer_of

HERE = replace(Platform.parse("nvidia:sm90,cuda=13.0"), name="NVIDIA H200", core_count=3)
REQUEST = Request.parse(
    "dtype=bf16,kv_dtype=bf16,num_q_heads=4,num_kv_heads=2,head_dim=32,page_size=16"
)
JOB = Job(request=REQUEST, platform=HERE, device="cpu", options={})
DECODE, EXTEND = Load(batch_size=2, keys=40), Load(batch_size=2, keys=40, new=8)
LATENT = replace(
    JOB,
    request=Request.parse(
        "kind=mla,dtype=bf16,kv_dtype=bf16,num_q_heads=4,num_kv_heads=1,head_dim=48,"
        "kv_lora_rank=32,qk_rope_head_dim=16,page_size=1"
    ),
)


@pytest.mark.parametrize("job", [JOB, LATENT], ids=["gqa", "latent"])
@pytest.mark.parametrize(
    ("load", "axes", "kind"),
    [
        (DECODE, {"block_n": (16, 64), "num_warps": (4,)}, "shares"),
        (EXTEND, {"block_m": (16, 32)}, "tiles"),
    ],
    ids=["decode", "extend"],
)
def test_today_s_config_and_others_are_tried(job, load, axes, kind):
    trials = list(tuning.tried(job, (load,), axes))
    assert [trial.is_current for trial in trials] == [True] + [False] * (len(trials) - 1)
    assert len(trials) >= 2
    for trial in trials:
        assert trial.error == ""
        assert trial.median_us > 0
        assert trial.subject["kind"] == kind
        assert trial.values["kernel"] == "portable"
    assert len({tuple(trial.values.items()) for trial in trials}) == len(trials)


def test_a_config_that_fails_or_computes_something_else_has_no_time(monkeypatch):
    timed, calls = tuning._timed, []

    def failing(job, setups, tables):
        calls.append(tables)
        if len(calls) == 2:
            raise BackendFailed("triton", "attend_shares does not compile: out of resource")
        found = timed(job, setups, ConfigTables())
        outs = tuple(torch.zeros_like(out) for out in found.outs)
        return found if len(calls) == 1 else replace(found, outs=outs)

    monkeypatch.setattr(tuning, "_timed", failing)
    today, unable, wrong = tuning.tried(JOB, (DECODE,), {"block_n": (16, 32)})
    assert today.is_current
    assert (unable.median_us, wrong.median_us) == (None, None)
    assert "out of resource" in unable.error
    assert wrong.error == "another result"


def test_a_request_without_heads_and_dims_is_refused():
    with pytest.raises(InvalidInput, match="head_dim=128"):
        next(tuning.tune(replace(JOB, request=Request.parse("dtype=bf16,page_size=1"))))


def test_the_card_names_the_tuner():
    assert TRITON.tuner == f"{tuning.__name__}:{tuning.tune.__name__}"


SHAPE = Shape.of(layer_of(REQUEST))
SHARES = ShareConfig(
    block_m=64,
    block_n=16,
    num_warps=8,
    num_stages=4,
    programs_per_unit=3,
    least_share=1,
    merged_rows=8,
)
TILES = TileConfig(block_m=32, block_n=16, num_warps=2, num_stages=6)


def tuned(config, **changes):
    kind = "tiles" if isinstance(config, TileConfig) else "shares"
    given = {
        "backend": ADDRESS,
        "device": Device.of(HERE),
        "versions": {},
        "subject": {"kind": kind, "k_dim": 32, "v_dim": 32, "rows": 2, "page": 16},
        "values": tuning._values(config),
        "median_us": 5.0,
        "date": datetime(2026, 5, 1, tzinfo=timezone.utc),
    }
    return TunedLaunch(**{**given, **changes})


def query(page: int, queries: int = 1) -> ConfigQuery:
    return ConfigQuery.of(SHAPE, queries, "sm90", page, (PORTABLE,), key_bits=16)


def test_what_was_tuned_wins_over_the_tables():
    tables = ConfigTables.of([tuned(SHARES), tuned(TILES)], "sm90")
    assert tables.tiles(query(16)) == TILES
    # A tile has no more rows than a request.
    assert tables.shares(query(16)) == replace(SHARES, block_m=16)
    assert tables.tiles(query(1)) == ConfigTables().tiles(query(1))


@pytest.mark.parametrize(
    ("changes", "is_used"),
    [
        ({}, True),
        ({"device": Device.of(replace(HERE, name="NVIDIA H100"))}, False),
        ({"versions": {"no-such-library": "1"}}, False),
        ({"backend": "triton/another"}, False),
    ],
)
def test_the_factory_takes_its_own_from_the_context(changes, is_used):
    case = Case(name="tuned", steps=(decode(5),), head_dim=32, v_head_dim=32, page_size=16)
    setup = make_setup(case, HERE, "cpu", launches=(tuned(TILES, **changes),))
    layer, *_ = triton(setup.context, {})._layers.values()
    assert (layer.tiles == TILES) is is_used


@pytest.mark.parametrize(
    "changes",
    [
        {"values": {**tuning._values(SHARES), "block_n": 0}},
        {"values": {**tuning._values(SHARES), "block_n": "64"}},
        {"values": {**tuning._values(SHARES), "color": 3}},
        {"values": {**tuning._values(SHARES), "kernel": "hopper"}},
        {"values": tuning._values(TILES)},
        {"subject": {"kind": "shares", "k_dim": 32, "v_dim": 32, "rows": True, "page": 16}},
        {"subject": {"kind": "shapes", "k_dim": 32, "v_dim": 32, "rows": 2, "page": 16}},
        {"subject": {}},
    ],
)
def test_a_launch_that_no_kernel_takes_is_left_out(changes):
    with pytest.warns(UserWarning, match="a tuned launch is left out"):
        tables = ConfigTables.of([tuned(SHARES, **changes), tuned(TILES)], "sm90")
    assert (len(tables.own_shares), len(tables.own_tiles)) == (0, 1)
