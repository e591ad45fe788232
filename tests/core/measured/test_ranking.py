"""Measurements of this machine: which count, and what they change."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from itertools import permutations, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmux.core import Decision, InvalidInput, Measurement, Platform, Policy, Request, solve
from attnmux.core.choosing.checking import prior_rank
from attnmux.core.cli.outcomes import outcomes
from attnmux.core.measured.evidence import evidence_of
from attnmux.core.measured.ranking import ranking_by, ranks
from attnmux.core.plugin import Clause, Prior, one_of
from attnmux.core.verbs import Device, Question
from attnmux.testing.bench.keeping import RecordFile

NOW = datetime(2026, 5, 1, 12, tzinfo=timezone.utc)
REQUEST = Request.parse("num_q_heads=32,num_kv_heads=8,head_dim=128,dtype=bf16")
HOPPER = replace(Platform.parse("nvidia:sm90,cuda=12.8", is_here=True), name="NVIDIA H200")
LIBRARIES = {"fast-kernels": "2.1"}.get


def question(request=REQUEST, phase="decode", platform=HOPPER) -> Question:
    return Question(request=request, platform=platform, phase=phase)


def timed(offer, median_us, request=REQUEST, phase="decode", **given) -> Measurement:
    fields = {
        "backend": offer.address,
        "phase": phase,
        "shape": Measurement.shape_of(question(request, phase)),
        "workload": "batch=32,kv=4096",
        "device": Device.of(HOPPER),
        "versions": offer.versions(LIBRARIES),
        "median_us": median_us,
        "conformant": True,
        "date": NOW,
    }
    return Measurement(**{**fields, **given})


def measured_ranking(measurements, platform, offers, policy=None, **given):
    return ranking_by(evidence_of(measurements, platform, offers, policy, **given))


def decide(offers, measurements, policy=None, request=REQUEST, platform=HOPPER) -> Decision:
    ranking = measured_ranking(measurements, platform, offers, policy, libraries=LIBRARIES)
    return solve(request, platform, offers, policy, libraries=LIBRARIES, ranking=ranking)


def decode(offers, measurements, **given) -> str:
    return decide(offers, measurements, **given).phases["decode"].backend


@pytest.fixture
def pair(offer):
    """The priors favour a."""
    return [offer("a", rank=10, requires=("fast-kernels>=2",)), offer("b", rank=20)]


@pytest.fixture
def faster(pair):
    """b takes half the time of a."""
    return [timed(pair[0], 100.0), timed(pair[1], 50.0)]


def test_the_faster_one_wins_where_it_was_measured(pair, faster) -> None:
    decision = decide(pair, faster)
    chosen = {phase: choice.backend for phase, choice in decision.phases.items()}
    assert chosen == {"decode": "b", "extend": "a"}
    told = {(v.backend, v.phase): (v.rank, v.measured) for v in decision.candidates}
    assert told["b", "decode"] == (10, True)
    assert told["a", "decode"] == (11, True)
    assert told["a", "extend"] == (10, False)


def test_the_decision_says_so(pair, faster) -> None:
    decision = decide(pair, faster)
    assert (
        "b (fake) serves decode, rank 10 (measured on this machine; the fastest of 2), "
        "the best of 2 that fit" in decision.summary()
    )
    assert "a (fake) serves extend, rank 10, the best of 2" in decision.summary()
    told = outcomes(decision, pair, Policy())
    assert [o.source for o in told if o.standing == "chosen"] == [
        "the test",
        "measured on this machine; the fastest of 2",
    ]
    assert Decision.from_json(decision.to_json()) == decision


@pytest.mark.parametrize(
    ("median_us", "winner"), [(97.9, "b"), (98.1, "a"), (100, "a"), (120, "a")]
)
def test_a_gain_of_two_percent_is_needed(pair, median_us, winner) -> None:
    assert decode(pair, [timed(pair[0], 100.0), timed(pair[1], median_us)]) == winner


@pytest.mark.parametrize(
    "change",
    [
        {"conformant": False},
        {"device": replace(Device.of(HOPPER), name="NVIDIA H100")},
        {"device": replace(Device.of(HOPPER), runtime="cuda 12.9")},
        {"device": replace(Device.of(HOPPER), arch="sm100")},
        {"device": replace(Device.of(HOPPER), vendor="amd")},
        {"versions": {"attnmux-fake": "1.2.2"}},
        {"versions": {"attnmux-fake": "1.2.3", "fast-kernels": "2.1"}},
        {"phase": "extend"},
        {"shape": "head_dim=64"},
        {"workload": "batch=1,kv=4096"},
        {"backend": "other/b"},
    ],
)
def test_measurements_that_do_not_count(pair, faster, change) -> None:
    assert decode(pair, [faster[0], replace(faster[1], **change)]) == "a"


def test_a_library_that_changed_since(pair, faster) -> None:
    newer = {"fast-kernels": "2.2"}.get
    ranking = measured_ranking(faster, HOPPER, pair, libraries=newer)
    assert ranking(pair[1], question()) == prior_rank(pair[1], question())


def test_a_question_about_another_machine_is_answered_by_priors(pair, faster) -> None:
    elsewhere = replace(HOPPER, is_here=False)
    assert measured_ranking(faster, elsewhere, pair, libraries=LIBRARIES) is prior_rank


def test_the_latest_of_one_subject_counts(pair, faster) -> None:
    later = replace(faster[1], date=NOW + timedelta(days=1), median_us=99.0)
    assert decode(pair, [later, *faster]) == "a"
    failed = replace(later, conformant=False, median_us=1.0)
    assert decode(pair, [failed, *faster]) == "a"
    mended = replace(failed, date=NOW + timedelta(days=2), conformant=True)
    assert decode(pair, [mended, failed, *faster]) == "b"


def test_a_failure_in_one_workload_bars_the_others(pair, faster) -> None:
    failed = replace(faster[1], workload="batch=1,kv=64", conformant=False)
    assert decode(pair, [*faster, failed]) == "a"


def test_workloads_count_alike(pair, faster) -> None:
    small = [replace(each, workload="batch=1,kv=64") for each in faster]
    slower = replace(small[1], median_us=250.0)
    assert decode(pair, [*faster, small[0], slower]) == "a"
    assert decode(pair, [*faster, small[0], replace(slower, median_us=150.0)]) == "b"


@pytest.mark.parametrize(
    "policy",
    [
        Policy(backend="a"),
        Policy(decode_backend="a", origins={"decode_backend": "env"}),
        Policy(backend="a", origins={"backend": "config"}),
        Policy(prefer=("a",)),
        Policy(deny=("b",)),
        Policy(allow=("a",)),
    ],
)
def test_a_policy_outweighs_measurements(pair, faster, policy) -> None:
    assert decode(pair, faster, policy=policy) == "a"


def test_a_barred_backend_changes_no_rank(offer) -> None:
    """c passes a, but not b, and a is denied: b stays."""
    a, b, c = offers = [offer(name, rank=rank) for name, rank in (("a", 10), ("b", 20), ("c", 30))]
    found = [timed(a, 100.0), timed(b, 97.5), timed(c, 97.0)]
    assert decode(offers, found) == "c"
    assert decode(offers, found, policy=Policy(deny=("a",))) == "b"


def test_a_backend_that_does_not_serve_changes_no_rank(offer) -> None:
    a, b, c = offers = [
        offer("a", rank=10, page_size=one_of(64)),
        offer("b", rank=20),
        offer("c", rank=30),
    ]
    asked = REQUEST.replace(page_size=16)
    found = [timed(each, us, asked) for each, us in ((a, 100.0), (b, 97.5), (c, 97.0))]
    assert decode(offers, found, request=asked) == "b"


def test_measured_at_the_page_size_that_a_backend_prefers(offer) -> None:
    """Nobody asks for a page size: backends that share none are compared all the same."""
    offers = [
        offer("a", rank=10, page_size=one_of(64)),
        offer("b", rank=20, page_size=one_of(1, 16)),
    ]
    found = [timed(offers[0], 100.0, phase=p) for p in ("decode", "extend")]
    found += [timed(offers[1], 50.0, phase=p) for p in ("decode", "extend")]
    decision = decide(offers, found)
    assert (decision.phases["decode"].backend, decision.page_size) == ("b", 1)
    assert decide(offers, []).page_size == 64


def test_priors_that_depend_on_the_page_size(offer) -> None:
    priors = (
        Prior(rank=30, when=Clause.when(page_size=one_of(64)), source="x"),
        Prior(rank=5, source="x"),
    )
    a, b = offer("a", priors=priors), offer("b", rank=20)
    ranking = measured_ranking(
        [timed(a, 90.0), timed(b, 100.0)], HOPPER, [a, b], libraries=LIBRARIES
    )
    for page_size, expected in ((64, (20, 21)), (1, (5, 20)), (64, (20, 21))):
        tried = question(REQUEST.replace(origin="default", page_size=page_size))
        assert (ranking(a, tried).value, ranking(b, tried).value) == expected


def test_the_unmeasured_keep_their_places(offer) -> None:
    """b passes a; what stood between them is behind both."""
    offers = [offer(name, rank=rank) for name, rank in (("a", 10), ("b", 30), ("u", 20), ("t", 5))]
    found = [timed(offers[0], 100.0), timed(offers[1], 50.0)]
    decision = decide(offers, found)
    order = [v.backend for v in decision.candidates if v.phase == "decode"]
    assert order == ["t", "b", "a", "u"]


def test_the_order_of_offers_and_measurements_does_not_matter(offer) -> None:
    """Two of the three are level by their priors, and level in time within 2 %."""
    offers = [offer("a", rank=10), offer("b", rank=20), offer("c", rank=20)]
    found = [timed(each, us) for each, us in zip(offers, (100.0, 90.0, 91.0), strict=True)]
    expected = decide(offers, found)
    told = {v.backend: v.rank for v in expected.candidates if v.phase == "decode"}
    assert told == {"b": 10, "c": 10, "a": 11}
    for shuffled, measured in product(permutations(offers), permutations(found)):
        assert decide(shuffled, measured) == expected


def test_a_last_resort_that_is_faster_is_none(offer) -> None:
    offers = [offer("a", rank=10), offer("b", rank=Prior.LAST_RESORT)]
    found = [timed(offers[0], 100.0), timed(offers[1], 50.0)]
    assert not decide(offers, found).is_last_resort


def test_the_shape_lists_the_demands() -> None:
    plain = Measurement.shape_of(question())
    assert (
        plain == "dtype=bfloat16,group_size=4,head_dim=128,kind=mha,num_kv_heads=8,num_q_heads=32"
    )
    tried = REQUEST.replace(origin="default", page_size=64, kv_dtype="bfloat16")
    assert Measurement.shape_of(question(tried)) == plain
    assert (
        Measurement.shape_of(question(platform=Platform.parse("cpu:x86_64,features=amx"))) == plain
    )
    assert "page_size=64" in Measurement.shape_of(question(REQUEST.replace(page_size=64)))
    assert "kv_dtype=fp8_e4m3" in Measurement.shape_of(
        question(REQUEST.replace(kv_dtype="fp8_e4m3"))
    )
    assert "graph=True" in Measurement.shape_of(question(REQUEST.replace(graph=True)))


def test_versions_of_the_plugin_and_its_installed_libraries(offer) -> None:
    found = offer("a", requires=(("fast-kernels>=1", "slow-kernels"), "none-of-it"))
    assert found.versions(LIBRARIES) == {"attnmux-fake": "1.2.3", "fast-kernels": "2.1"}


NAMES = st.sampled_from("abcdef")
PRIORS = st.dictionaries(NAMES, st.integers(1, 60).map(lambda n: n * 10), min_size=1)
MICROSECONDS = st.integers(1, 400).map(float)


@given(PRIORS, st.data())
def test_ranks(priors, data) -> None:
    """The first is the fastest, unless it gains 2 % or less over the priors' winner."""
    times = {name: {"w": data.draw(MICROSECONDS)} for name in priors}
    found = ranks(priors, times)
    assert found.keys() == priors.keys()
    assert min(found.values()) == min(priors.values())
    favourite = min(priors, key=lambda name: (priors[name], name))
    fastest = min(times, key=lambda name: (times[name]["w"], priors[name], name))
    share = times[fastest]["w"] / times[favourite]["w"]
    if share < 0.9799:
        assert found[fastest] == min(priors.values())
        assert found[favourite] > found[fastest]
    elif share > 0.9801:
        assert found[favourite] == min(priors.values())
    for one in priors:
        for other in priors:
            if priors[one] < priors[other] and times[one]["w"] <= times[other]["w"]:
                assert found[one] < found[other]


@given(PRIORS, st.data())
def test_ranks_do_not_depend_on_order_or_units(priors, data) -> None:
    times = {name: {"w": data.draw(MICROSECONDS)} for name in priors}
    found = ranks(priors, times)
    turned = dict(reversed(priors.items()))
    assert ranks(turned, {n: {"w": times[n]["w"] * 4} for n in turned}) == found


@given(PRIORS, MICROSECONDS)
def test_equal_times_change_nothing(priors, median_us) -> None:
    assert ranks(priors, {name: {"w": median_us} for name in priors}) == priors
    assert ranks(priors, {name: {name: median_us} for name in priors}) == priors


def visible(folder) -> list[str]:
    """Without the lock of the writers."""
    return [each.name for each in folder.iterdir() if not each.name.endswith(".lock")]


class TestTheFile:
    def test_added_measurements_are_read(self, tmp_path, faster) -> None:
        path = tmp_path / "new" / "folder" / "measurements.json"
        RecordFile(path, Measurement).add(faster[:1])
        RecordFile(path, Measurement).add(faster[1:])
        stored = Measurement.read(path)
        assert (stored.found, stored.problems) == (tuple(faster), ())
        assert visible(path.parent) == [path.name]

    def test_the_later_replaces_the_earlier(self, tmp_path, faster) -> None:
        path = tmp_path / "measurements.json"
        later = replace(faster[0], median_us=7.0, date=NOW + timedelta(seconds=1))
        RecordFile(path, Measurement).add([later])
        RecordFile(path, Measurement).add(faster[:1])
        assert Measurement.read(path).found == (later,)

    def test_none_is_no_problem(self, tmp_path) -> None:
        stored = Measurement.read(tmp_path / "none.json")
        assert (stored.found, stored.problems) == ((), ())

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b"\xff\xfe",
            b'{"format": 2, "measurements": []}',
            b'{"format": 1}',
            b'{"format": 1, "measurements": 3}',
            b"[" * 100_000,
        ],
    )
    def test_one_of_another_version_is_set_aside_and_a_foreign_one_is_not_touched(
        self, tmp_path, faster, content
    ) -> None:
        path = tmp_path / "measurements.json"
        path.write_bytes(content)
        stored = Measurement.read(path)
        assert stored.found == ()
        assert str(path) in stored.problems[0]
        if not content.startswith(b'{"format"'):
            for write in (RecordFile.prepare, lambda file: file.add(faster)):
                with pytest.raises(FileExistsError, match="something else than measurements"):
                    write(RecordFile(path, Measurement))
            assert path.read_bytes() == content
            return
        RecordFile(path, Measurement).add(faster)
        assert Measurement.read(path).found == tuple(faster)
        assert (tmp_path / "measurements.json.damaged").read_bytes() == content

    @pytest.mark.parametrize(
        "make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")]
    )
    def test_what_is_no_file_is_neither_read_nor_replaced(self, tmp_path, faster, make) -> None:
        path = tmp_path / "measurements.json"
        make(path)
        assert "no regular file" in Measurement.read(path).problems[0]
        with pytest.raises(OSError, match=r"regular file|directory"):
            RecordFile(path, Measurement).add(faster)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("median_us", 0),
            ("median_us", float("nan")),
            ("median_us", 10**400),
            ("median_us", True),
            ("median_us", "fast"),
            ("conformant", 1),
            ("date", "yesterday"),
            ("date", "2026-05-01T12:00:00"),
            ("date", 5),
            ("device", "H200"),
            ("device", {"vendor": "nvidia"}),
            ("device", {"vendor": "nvidia", "arch": 1, "name": "", "runtime": ""}),
            ("versions", ["1"]),
            ("versions", {"torch": 2}),
            ("backend", ""),
            ("shape", None),
            ("power", 700),
        ],
    )
    def test_one_bad_entry_costs_no_other(self, tmp_path, faster, field, value) -> None:
        path = tmp_path / "measurements.json"
        with pytest.raises(InvalidInput, match="measurement"):
            Measurement.from_dict({**faster[0].to_dict(), field: value})
        entries = [{**faster[0].to_dict(), field: value}, faster[1].to_dict(), 3]
        path.write_text(json.dumps({"format": 1, "measurements": entries}))
        stored = Measurement.read(path)
        assert stored.found == (faster[1],)
        assert len(stored.problems) == 2
        assert f"{path}, measurements[0]" in stored.problems[0]

    def test_a_write_that_fails_leaves_the_old_one(self, tmp_path, faster, monkeypatch) -> None:
        path = tmp_path / "measurements.json"
        RecordFile(path, Measurement).add(faster[:1])

        def full(_: int) -> None:
            raise OSError("no space left")

        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="no space"):
            RecordFile(path, Measurement).add(faster[1:])
        assert Measurement.read(path).found == (faster[0],)
        assert visible(tmp_path) == [path.name]

    @given(
        content=st.binary()
        | st.recursive(
            st.none() | st.booleans() | st.floats() | st.text(),
            lambda inner: (
                st.lists(inner)
                | st.dictionaries(
                    st.sampled_from(["format", "measurements", "device", "date", "versions"])
                    | st.text(),
                    inner,
                )
            ),
        ).map(lambda data: json.dumps({"format": 1, "measurements": data}).encode())
    )
    def test_nothing_in_it_makes_the_reader_raise(self, tmp_path_factory, content) -> None:
        path = tmp_path_factory.mktemp("store") / "measurements.json"
        path.write_bytes(content)
        stored = Measurement.read(path)
        assert stored.found == ()
