"""The tuner, through the interpreter on tiny shapes; and which of its launches are used."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timezone

import pytest
import torch

from attnmux.core.choosing.launches import TunedLaunch, launch_file
from attnmux.core.choosing.measurement import Device
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.request import Request
from attnmux.core.choosing.trials import Job
from attnmux.core.errors import BackendFailed, InvalidInput

pytest.importorskip("triton")

from attnmux.triton import tuning
from attnmux.triton.cards.triton import TRITON
from attnmux.triton.launch import Launches
from attnmux.triton.launch_types import ShareLaunch, TileLaunch
from attnmux.triton.own_launches import ADDRESS, entries_of, own_launches
from attnmux.triton.shapes import Shape
from attnmux.triton.tuning_batches import Load, layer_of

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
def test_today_s_launch_and_others_are_tried(job, load, axes, kind):
    trials = list(tuning.tried(job, (load,), axes))
    assert [trial.is_current for trial in trials] == [True] + [False] * (len(trials) - 1)
    assert len(trials) >= 2
    for trial in trials:
        assert trial.error == ""
        assert trial.median_us > 0
        assert trial.subject["kind"] == kind
        assert trial.values["kernel"] == "portable"
    assert len({tuple(trial.values.items()) for trial in trials}) == len(trials)


def test_a_launch_that_does_not_compile_or_computes_something_else_has_no_time(monkeypatch):
    timed, calls = tuning._timed, []

    def failing(job, setups, launches):
        calls.append(launches)
        if len(calls) == 2:
            raise BackendFailed("triton", "attend_shares does not compile: out of resource")
        found = timed(job, setups, Launches())
        outs = tuple(torch.zeros_like(out) for out in found.outs)
        return found if len(calls) == 1 else replace(found, outs=outs)

    monkeypatch.setattr(tuning, "_timed", failing)
    today, unable, wrong = tuning.tried(JOB, (DECODE,), {"block_n": (16, 32)})
    assert today.is_current
    assert (unable.median_us, wrong.median_us) == (None, None)
    assert "out of resource" in unable.error
    assert wrong.error == "another result"


def test_heads_and_dims_have_to_be_asked_for():
    with pytest.raises(InvalidInput, match="head_dim=128"):
        next(tuning.tune(replace(JOB, request=Request.parse("dtype=bf16,page_size=1"))))


def test_the_card_names_the_tuner():
    assert TRITON.tuner == f"{tuning.__name__}:{tuning.tune.__name__}"


SHAPE = Shape.of(layer_of(REQUEST))
SHARES = ShareLaunch(
    block_m=64,
    block_n=16,
    num_warps=8,
    num_stages=4,
    programs_per_unit=3,
    least_share=1,
    merged_rows=8,
)
TILES = TileLaunch(block_m=32, block_n=16, num_warps=2, num_stages=6)


def tuned(launch, **changes):
    kind = "tiles" if isinstance(launch, TileLaunch) else "shares"
    given = {
        "backend": ADDRESS,
        "device": Device.of(HERE),
        "versions": {},
        "subject": {"kind": kind, "k_dim": 32, "v_dim": 32, "rows": 2, "page": 16},
        "values": tuning._values(launch),
        "median_us": 5.0,
        "date": datetime(2026, 5, 1, tzinfo=timezone.utc),
    }
    return TunedLaunch(**{**given, **changes})


def test_what_was_tuned_here_counts_before_the_tables(tmp_path, monkeypatch):
    path = tmp_path / "launches.json"
    monkeypatch.setenv("ATTNMUX_LAUNCHES", str(path))
    assert own_launches(HERE) == Launches()
    launch_file(path).add([tuned(SHARES), tuned(TILES)])
    own = own_launches(HERE)
    assert own.tiles(SHAPE, "sm90", 16) == TILES
    # Of the rows that there are, and of the parts that then fit.
    assert own.shares(SHAPE, 1, "sm90", 16) == replace(SHARES, block_m=16)
    assert own.tiles(SHAPE, "sm90", 1) == Launches().tiles(SHAPE, "sm90", 1)
    assert own_launches(replace(HERE, name="NVIDIA H100")) == Launches()
    monkeypatch.setenv("ATTNMUX_NO_LAUNCHES", "1")
    assert own_launches(HERE) == Launches()


@pytest.mark.parametrize("content", ["{", '{"format": 1, "launches": [3]}'])
def test_a_file_that_cannot_be_read_is_warned_of_and_breaks_nothing(tmp_path, monkeypatch, content):
    path = tmp_path / "launches.json"
    path.write_text(content)
    monkeypatch.setenv("ATTNMUX_LAUNCHES", str(path))
    with pytest.warns(UserWarning, match=str(path)):
        assert own_launches(HERE) == Launches()
    monkeypatch.setenv("ATTNMUX_NO_SUCH_SETTING", "1")
    with pytest.warns(UserWarning, match="ATTNMUX_NO_SUCH_SETTING"):
        assert own_launches(HERE) == Launches()


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
def test_what_is_none_of_the_kernels_launches_is_left_out(changes):
    problems: list[str] = []
    found = entries_of([tuned(SHARES, **changes), tuned(TILES)], "sm90", problems)
    assert (len(found.own_shares), len(found.own_tiles), len(problems)) == (0, 1, 1)
