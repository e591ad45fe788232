"""The tuner, interpreted on tiny shapes, and which of its configurations are used."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest
import torch

from attnmux.core import BackendFailed, InvalidInput, Platform, Request, TunedLaunch
from attnmux.core.plugin import Job
from attnmux.core.verbs import Device
from attnmux.testing import Case, decode, make_setup

pytest.importorskip("triton")

from attnmux.triton.attention.factory import ADDRESS, triton
from attnmux.triton.launches import dispatch
from attnmux.triton.launches.config_tables import CHAINS, SHORT_TILES, ConfigTables
from attnmux.triton.launches.config_tables import SHARES as SHARES_TABLE
from attnmux.triton.launches.config_tables import TILES as TILES_TABLE
from attnmux.triton.launches.configs import HOPPER, PORTABLE, ConfigQuery, ShareConfig, TileConfig
from attnmux.triton.launches.hopper_configs import HOPPER_SHARES
from attnmux.triton.launches.shapes import Shape
from attnmux.triton.launches.tuned_configs import VARIANTS, Variants, config_of, values_of
from attnmux.triton.plugin import TRITON
from attnmux.triton.tune import tuning
from attnmux.triton.tune.loads import Load, layer_of

HERE = replace(Platform.parse("nvidia:sm90,cuda=13.0"), name="NVIDIA H200", core_count=3)
REQUEST = Request.parse(
    "dtype=bf16,kv_dtype=bf16,num_q_heads=4,num_kv_heads=2,head_dim=32,page_size=16"
)
JOB = Job(request=REQUEST, platform=HERE, device="cpu", options={})
DECODE, EXTEND = Load(batch_size=2, keys=40), Load(batch_size=2, keys=40, new=8)
VERIFY = replace(EXTEND, verifies=True)
LATENT = replace(
    JOB,
    request=Request.parse(
        "kind=mla,dtype=bf16,kv_dtype=bf16,num_q_heads=4,num_kv_heads=1,head_dim=48,"
        "kv_lora_rank=32,qk_rope_head_dim=16,page_size=1"
    ),
)


def portable(axes):
    return {(PORTABLE, kind): Variants(axes=axes) for kind in (TileConfig, ShareConfig)}


@pytest.mark.parametrize("job", [JOB, LATENT], ids=["gqa", "latent"])
@pytest.mark.parametrize(
    ("load", "axes", "kind"),
    [
        (DECODE, {"block_n": (16, 64), "num_warps": (4,)}, "shares"),
        (VERIFY, {"least_share": (1, 4)}, "shares"),
        (EXTEND, {"block_m": (16, 32)}, "tiles"),
    ],
    ids=["decode", "verify", "extend"],
)
def test_today_s_config_and_others_are_tried(job, load, axes, kind):
    trials = list(tuning.tried(job, (load,), portable(axes)))
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
    today, unable, wrong = tuning.tried(JOB, (DECODE,), portable({"block_n": (16, 32)}))
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
        "subject": {"kind": kind, "k_dim": 32, "v_dim": 32, "rows": 2, "page": 16, "key_bits": 16},
        "values": values_of(config),
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
        {"values": {**values_of(SHARES), "block_n": 0}},
        {"values": {**values_of(SHARES), "block_n": "64"}},
        {"values": {**values_of(SHARES), "color": 3}},
        {"values": {**values_of(SHARES), "kernel": "hopper"}},
        {"values": values_of(TILES)},
        {
            "subject": {
                "kind": "shares",
                "k_dim": 32,
                "v_dim": 32,
                "rows": True,
                "page": 16,
                "key_bits": 16,
            }
        },
        {
            "subject": {
                "kind": "shapes",
                "k_dim": 32,
                "v_dim": 32,
                "rows": 2,
                "page": 16,
                "key_bits": 16,
            }
        },
        {"subject": {}},
    ],
)
def test_a_launch_that_no_kernel_takes_is_left_out(changes):
    with pytest.warns(UserWarning, match="a tuned launch is left out"):
        tables = ConfigTables.of([tuned(SHARES, **changes), tuned(TILES)], "sm90")
    assert (len(tables.own_shares), len(tables.own_tiles)) == (0, 1)


def variants():
    for (_, kind), of_kernel in VARIANTS.items():
        for base in of_kernel.bases:
            yield kind, base
            for axis, numbers in of_kernel.axes.items():
                yield from ((kind, replace(base, **{axis: number})) for number in numbers)


def in_tables():
    for table in (TILES_TABLE, SHORT_TILES, CHAINS, SHARES_TABLE):
        yield from ((type(entry.config), entry.config) for entry in table)


@pytest.mark.parametrize("configs", [variants, in_tables])
def test_every_config_is_read_as_it_was_written(configs):
    for kind, config in configs():
        assert config_of(kind, values_of(config)) == config


@pytest.mark.parametrize("changes", [{"num_stages": 5}, {"COPY_REGISTERS": 80}, {"num_warps": 8}])
def test_a_hopper_kernel_takes_no_other_numbers(changes):
    with pytest.raises(InvalidInput, match="one that `tune` tries"):
        config_of(ShareConfig, {**values_of(HOPPER_SHARES), **changes})


def test_a_launch_serves_keys_of_the_bits_that_it_was_tuned_for():
    tables = ConfigTables.of([tuned(SHARES)], "sm90")
    narrow = replace(query(16), key_bits=8)
    assert tables.whole_shares(query(16)) == SHARES
    assert tables.whole_shares(narrow) == ConfigTables().whole_shares(narrow)


def test_what_was_tuned_for_decode_leaves_drafts_to_entries_for_more_rows():
    decode = tuned(SHARES)
    subject = {**decode.subject, "k_dim": 128, "v_dim": 128, "rows": 4, "key_bits": 8}
    tables = ConfigTables.of([replace(decode, subject=subject)], "sm90")
    kernels = {PORTABLE, HOPPER}
    at = replace(query(16), dims=(128, 128), rows=4, key_bits=8, kernels=frozenset(kernels))
    assert tables.whole_shares(at) == SHARES
    drafts = replace(at, rows=32)
    assert tables.whole_shares(drafts) == ConfigTables().whole_shares(drafts) != SHARES


def test_chains_of_drafts_have_launches_of_their_own():
    launch = tuned(TILES)
    chains = replace(launch, subject={**launch.subject, "kind": "chains", "rows": 8})
    tables = ConfigTables.of([chains], "sm90")
    assert tables.chains(query(16, queries=8)) == TILES
    assert tables.chains(query(16, queries=2)) is None
    assert tables.tiles(query(16)) == ConfigTables().tiles(query(16))


def test_the_whole_configs_of_a_hopper_kernel_are_tried_first(monkeypatch):
    """Then single fields of the fastest, here the third; the times are made up."""
    monkeypatch.setattr(dispatch, "can_compile", lambda address: True)
    monkeypatch.setattr(dispatch, "_is_importable", lambda address: True)
    tried = []

    def timed(job, setups, tables):
        tried.append(tables)
        us = 5.0 if len(tried) == 3 else 9.0
        return tuning.Timed(median_us=us, outs=(torch.ones(1),))

    monkeypatch.setattr(tuning, "_timed", timed)
    request = replace(REQUEST, head_dim=128, v_head_dim=128)
    today, *others = tuning.tried(replace(JOB, request=request), (DECODE,))
    bases = [base for base in VARIANTS[HOPPER, ShareConfig].bases if base != HOPPER_SHARES]
    assert today.values == values_of(HOPPER_SHARES)
    assert [trial.values for trial in others[: len(bases)]] == [values_of(base) for base in bases]
    for trial in others[len(bases) :]:
        best, given = values_of(bases[1]), dict(trial.values)
        assert len(best.items() - given.items()) == 1
    assert len({tuple(trial.values.items()) for trial in others}) == len(others)
