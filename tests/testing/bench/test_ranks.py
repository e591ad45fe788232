"""Ranks that measure together: figures of the slowest, the same launches tried, one file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from attnmux.core import (
    AttnmuxError,
    BackendFailed,
    InvalidInput,
    Measurement,
    Offer,
    Policy,
    Request,
    TunedLaunch,
    solve_measured,
)
from attnmux.core.plugin import Job, Trial
from attnmux.core.verbs import Device, Run
from attnmux.distributed import RankGroup, RanksDiffer, shared_launches
from attnmux.emulators.ranks import run_ranks
from attnmux.testing import FakeBackend, fake_card, fake_platform
from attnmux.testing.bench import Ceilings, measuring
from attnmux.testing.bench.cli import bench_run
from attnmux.testing.bench.cli.tune import try_launches
from attnmux.testing.bench.ranks import joined, shared_trials, together_on
from attnmux.testing.bench.workload import Workload

ASKED = Request(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype="bfloat16")
US = {"Quick": (10.0, 30.0), "Steady": (20.0, 20.0)}
"""Microseconds of each backend on each rank: rank 0 alone would choose the first."""


class Quick(FakeBackend):
    """Slow on rank 1."""


class Steady(FakeBackend):
    """As slow on each rank."""


def offer_of(found: object, *, plugin: str = "fakes", **changes: Any) -> Offer:
    """An offer whose card names `found`, which has to lie in a module that can be imported."""
    name = found.__name__
    module = ModuleType(f"of_ranks_{name.lower()}")
    setattr(module, name, found)
    sys.modules[module.__name__] = module
    card = replace(fake_card(), name=name, factory=f"{module.__name__}:{name}", **changes)
    return Offer(card=card, plugin=plugin, distribution="attnmux-fake", version="1.0")


def benched(group: RankGroup, folder: Path) -> tuple[list[tuple[str, float]], bool, list[str], str]:
    def named(backend: FakeBackend, step: object) -> Callable[[], None]:
        run = layers(backend, step)

        def call() -> None:
            run()

        call.backend = type(backend).__name__
        return call

    layers = measuring.all_layers
    patch = pytest.MonkeyPatch()
    patch.setattr(measuring, "all_layers", named)
    times = {name: each[group.rank] for name, each in US.items()}
    patch.setattr(
        measuring, "median_us", lambda run, _: times.get(getattr(run, "backend", ""), 1.0)
    )
    patch.setattr(bench_run, "ceilings", lambda *_: Ceilings(read_gbs=10.0, matmul_tflops=0.5))
    offers = (offer_of(Quick), offer_of(Steady))
    place = bench_run.Place(platform=fake_platform(), device="cpu", offers=offers, ranks=group)
    path = folder / f"measurements-{group.rank}.json"
    keeper = bench_run.Keeper(
        path=path,
        request=ASKED,
        place=place,
        policy=Policy(),
        known=(),
        before=solve_measured(ASKED, place.platform, offers, Policy(), measurements=()),
    )
    step = [Workload.parse("decode:bs=2,ctx=21")]
    with patch.context():
        result = bench_run.measure(place, ASKED, Policy(), workloads=step, names=(), seconds=0.01)
        kept = keeper.keep(result, 0.0)
    patch.undo()
    layer_us = [(row.backend, row.median_us or 0) for row in result.rows]
    stored = [f"{each.backend} {each.median_us:g}" for each in Measurement.read(path).found]
    chosen = kept.after.phases["decode"].backend
    return layer_us, all(check.conformant for check in kept.checks), stored, chosen


def launch(warps: int) -> TunedLaunch:
    return TunedLaunch(
        backend="fakes/a",
        device=Device.of(fake_platform()),
        versions={},
        subject={"kind": "tiles"},
        values={"warps": warps},
        median_us=1.0,
        date=datetime(2026, 1, 1, tzinfo=UTC),
    )


def followed(job: Job) -> Iterator[Trial]:
    """Goes on from the fastest: 8 warps on rank 0 alone, 4 by the slowest of both."""
    times = {4: (20.0, 20.0), 8: (10.0, 40.0), 16: (50.0, 5.0), 5: (19.0, 19.0)}
    best, least = 4, 1e9
    for warps in (4, 8, 16):
        _, (us,) = job.together(lambda warps=warps: (None, (times[warps][RANK[0]],)))
        yield Trial(subject={}, values={"warps": warps}, median_us=us, is_current=warps == 4)
        best, least = (warps, us) if us < least else (best, least)
    _, (us,) = job.together(lambda: (None, (times.get(best + 1, (99.0, 99.0))[RANK[0]],)))
    yield Trial(subject={}, values={"warps": best + 1}, median_us=us)


def stubborn(job: Job) -> Iterator[Trial]:
    """Tries what is fast on its own rank."""
    yield Trial(subject={}, values={"warps": RANK[0]}, median_us=1.0)


RANK: list[int] = []
"""This process's, for the tuners."""


def tuned(group: RankGroup) -> tuple[list[tuple[object, float | None]], list[object], str]:
    RANK.append(group.rank)
    job = Job(
        request=ASKED,
        platform=fake_platform(),
        device="cpu",
        options={},
        together=together_on(group),
    )

    def offer(tuner: Callable[..., object]) -> Offer:
        named = offer_of(tuner)
        card = replace(named.card, factory="attnmux.testing:FakeBackend", tuner=named.card.factory)
        return replace(named, card=card)

    (found,) = try_launches(Run(), [(offer(followed), job)], group)
    tried = [(each.values["warps"], each.median_us) for each in found.trials]
    won = [each.values["warps"] for each in found.launches()]
    with pytest.raises(RanksDiffer) as info:
        list(try_launches(Run(), [(offer(stubborn), job)], group))
    return tried, won, str(info.value)


def shared(group: RankGroup) -> dict[str, object]:
    together = together_on(group)
    mine, figures = together(lambda: (group.rank, (1.0 + group.rank, 9.0 - group.rank)))

    def failing(error: Exception, rank: int) -> str:
        def measure() -> tuple[None, tuple[float]]:
            if group.rank == rank:
                raise error
            return None, (1.0,)

        with pytest.raises((AttnmuxError, ValueError)) as info:
            together(measure)
        return f"{type(info.value).__name__}: {info.value}"

    errors = [None, "out of memory"]
    times = [1.0, None]
    trials = [
        Trial(subject={}, values={"warps": n}, median_us=3.0 if n else times[group.rank],
              error="" if n else errors[group.rank] or "")
        for n in range(2)
    ]  # fmt: skip
    return {
        "mine": mine,
        "figures": figures,
        "compiler": failing(BackendFailed("fakes/a", "no driver"), 1),
        "any": failing(ValueError("shape"), 0),
        "launches": [each.values["warps"] for each in shared_launches(group, [launch(group.rank)])],
        "trials": [(each.median_us, each.error) for each in shared_trials(group, "a", trials)],
    }


def everything(group: RankGroup, folder: Path) -> dict[str, Any]:
    """One pair of processes for all tests: to import torch takes longer than any of them."""
    return {"benched": benched(group, folder), "tuned": tuned(group), "shared": shared(group)}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(everything, 2, folder, folder)


@pytest.mark.turns(3, suite="ranks")
def test_a_figure_is_that_of_the_slowest_rank_and_rank_0_keeps_it(of_ranks) -> None:
    slowest = [("fakes/Quick", 30.0), ("fakes/Steady", 20.0)]
    first, second = (each["benched"] for each in of_ranks)
    layers = 30.0 / dict(first[0])["fakes/Quick"]
    assert [(name, us * layers) for name, us in first[0]] == slowest
    assert first[0] == second[0]
    assert first[1] is second[1] is True
    assert sorted(first[2]) == [f"{name} {us / layers:g}" for name, us in slowest]
    assert second[2] == []
    assert first[3] == "Steady"


def test_all_ranks_try_the_launches_that_follow_from_the_slowest(of_ranks) -> None:
    for tried, won, said in (each["tuned"] for each in of_ranks):
        assert tried == [(4, 20.0), (8, 40.0), (16, 50.0), (5, 19.0)]
        assert won == [5]
        assert "stubborn tried: expected the same on every rank" in said
        assert said.endswith("a tuner that looks at times takes those of Job.together")


def test_what_fails_on_one_rank_fails_on_all(of_ranks) -> None:
    first, second = (each["shared"] for each in of_ranks)
    assert (first["mine"], second["mine"]) == (0, 1)
    assert first["figures"] == second["figures"] == (2.0, 9.0)
    assert first["compiler"] == "BackendFailed: fakes/a cannot run here: on rank 1: no driver"
    assert second["compiler"] == "BackendFailed: fakes/a cannot run here: no driver"
    assert first["any"] == "ValueError: shape"
    assert second["any"] == "AttnmuxError: on rank 0: ValueError: shape"
    assert first["trials"] == [(None, "on rank 1: out of memory"), (3.0, "")]
    assert second["trials"] == [(None, "out of memory"), (3.0, "")]


def test_the_launches_are_those_of_rank_0(of_ranks) -> None:
    assert [each["shared"]["launches"] for each in of_ranks] == [[0], [0]]


def test_several_ranks_without_their_extra_are_refused_with_what_installs_it(monkeypatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    monkeypatch.setitem(sys.modules, "attnmux.distributed", None)
    with pytest.raises(InvalidInput, match=r"pip install 'attnmux-testing\[ranks\]'"):
        joined("cpu", "")
