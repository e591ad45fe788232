"""The trial before first use: which cases it takes, what it refuses, and when a pass is kept."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from attnmux.core import BackendFailed, Plugins, Request, solve
from attnmux.core.cards.installed_files import digest
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.measured.store import Store
from attnmux.core.plugin import Verified
from attnmux.core.verbs import Passes, Unverified
from attnmux.testing import FirstUse, fake_card, find_candidate, run_case
from attnmux.testing.cases.case import PHASES
from attnmux.testing.first_use.shaped import cases_in_shape
from attnmux.testing.first_use.trial_cases import trial_cases
from attnmux.testing.run.candidate import Outcome
from attnmux.testing.verification.run import Verification
from attnmux.testing.verification.summary import Keeper

SHAPES = {"dtype": "float32", "kv_dtype": "float32", "num_q_heads": 4, "num_kv_heads": 2}
REQUEST = Request(**SHAPES, head_dim=16, phases=("extend", "decode"))
SPECULATING = ("extend", "decode", "verify", "draft")


@pytest.fixture
def offers():
    return [each for each in Plugins.load().offers() if each.card.name == "torch_native"]


@pytest.fixture
def in_process(monkeypatch) -> list:
    """Cases run here; the list gets them."""
    ran = []

    def run(candidate, trials, **_):
        for case, seed in trials:
            ran.append(case)
            yield run_case(candidate, case, seed=seed)

    monkeypatch.setattr("attnmux.testing.first_use.first_use.run_in_children", run)
    return ran


def decided(offers, page_size: int = 16):
    return solve(REQUEST.replace(page_size=page_size), probe_cpu(), offers)


def trial(offers, cache: Path | None, said: list | None = None) -> FirstUse:
    return FirstUse(
        offers, device="cpu", cache=cache, say=[].append if said is None else said.append
    )


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_each_phase_has_a_case_over_several_pages(page_size) -> None:
    candidate = find_candidate("torch_native", device="cpu")
    cases = trial_cases(candidate, REQUEST, SPECULATING, page_size=page_size)
    assert not cases.missing
    assert len(cases.needed) == len(SPECULATING)
    for case, phase in zip(cases.needed, SPECULATING, strict=True):
        steps = [step for step in case.steps if PHASES[step.mode] == phase]
        assert case.page_size == page_size
        assert any(
            page_size <= cached < total <= 8 * page_size
            for step in steps
            for cached, total in zip(step.cached, step.lens, strict=True)
        )


def test_an_encoder_has_cases() -> None:
    candidate = find_candidate("torch_native", device="cpu")
    request = REQUEST.replace(encoder_head_dim=24)
    (case,) = trial_cases(candidate, request, ["encoder"], page_size=64).needed
    assert (case.is_encoder, case.head_dim, case.dtype) == (True, 24, "float32")


@pytest.mark.parametrize("phase", ["decode", "extend"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_a_backend_that_skips_page_0_is_refused(
    offers, in_process, skip_page_0, tmp_path, page_size, phase
) -> None:
    """In requests of more than one page, and in the steps of one phase alone."""
    skip_page_0(phase)
    with pytest.raises(BackendFailed, match=rf"case {phase}-.*-page{page_size} failed"):
        trial(offers, tmp_path)(decided(offers, page_size))
    assert in_process[-1] in trial_cases(
        find_candidate("torch_native", device="cpu"), REQUEST, ("extend", "decode"),
        page_size=page_size,
    ).needed  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_a_cards_claim_does_not_spare_it(offers, in_process, tmp_path) -> None:
    platform = probe_cpu()
    run = Verified(
        on="here", platform=f"{platform.vendor}:{platform.arch}", date="2026-11-21", libraries=()
    )
    offers = [replace(one, card=replace(one.card, verified_on=(run,))) for one in offers]
    said: list[str] = []
    assert not Unverified.by_cards(decided(offers), offers, ())
    trial(offers, tmp_path, said)(decided(offers))
    assert "it has not passed the suite here with its present files" in said[0]
    count = len(in_process)
    assert count > 2
    trial(offers, tmp_path)(decided(offers))
    assert len(in_process) == count
    trial(offers, tmp_path)(decided(offers, 64))
    assert len(in_process) > count


def test_a_trial_cut_short_is_not_kept_and_leaves_no_phase_out(
    offers, in_process, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr("attnmux.testing.first_use.first_use.SECONDS", -1.0)
    said: list[str] = []
    for _ in range(2):
        in_process.clear()
        trial(offers, tmp_path, said)(decided(offers))
        assert {phase for case in in_process for phase in case.phases} == {"extend", "decode"}
        assert "2 of" in said[-1]
        assert "the next use tries again" in said[-1]
    assert not list(tmp_path.iterdir())


def test_the_clock_starts_after_the_needed_cases(offers, in_process, monkeypatch, tmp_path) -> None:
    """In which kernels are compiled."""
    now = [0.0]
    monkeypatch.setattr("attnmux.testing.first_use.first_use.time.monotonic", lambda: now[0])

    class Slow(list):
        def append(self, case):
            super().append(case)
            now[0] += 1000.0 if len(self) <= 2 else 1.0

    slow = Slow()

    def run(candidate, trials, **_):
        for case, seed in trials:
            slow.append(case)
            yield run_case(candidate, case, seed=seed)

    monkeypatch.setattr("attnmux.testing.first_use.first_use.run_in_children", run)
    said: list[str] = []
    trial(offers, tmp_path, said)(decided(offers))
    assert len(slow) > 2
    assert len(said) == 1
    assert list(tmp_path.iterdir())


def test_a_phase_without_cases_is_said_and_not_kept(
    offers, in_process, monkeypatch, tmp_path
) -> None:
    def no_decode(candidate, request, phase, **given):
        return iter(()) if phase == "decode" else cases_in_shape(candidate, request, phase, **given)

    monkeypatch.setattr("attnmux.testing.first_use.trial_cases.cases_in_shape", no_decode)
    said: list[str] = []
    trial(offers, tmp_path, said)(decided(offers))
    assert said[0].startswith("the suite has no case of decode for cpu/torch_native")
    assert in_process
    assert not list(tmp_path.iterdir())


def verification(offers, **changes) -> Verification:
    facts = {
        "candidate": find_candidate("torch_native", device="cpu"),
        "distribution": offers[0].distribution,
        "outcomes": (Outcome(case="one", status="passed"),),
        "limits": (),
        "seed": 7,
        "is_complete": True,
        **dict.fromkeys(("sampled", "pairs", "pairs_covered"), 1),
    }
    return Verification(**{**facts, **changes})


def test_verify_keep_settles_the_warning_that_recommends_it(
    offers, in_process, monkeypatch, tmp_path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    offers = [replace(one, card=replace(one.card, verified_on=())) for one in offers]
    decision, store = decided(offers), Passes.in_cache(tmp_path / "attnmux")
    (warning,) = Unverified.by_cards(decision, offers, (), store)
    assert str(warning).endswith("`attnmux verify cpu/torch_native --keep` tries it")
    keeper = Keeper.of(find_candidate("torch_native", device="cpu"), offers)
    keeper.keep(verification(offers, is_complete=False))
    assert Unverified.by_cards(decision, offers, (), store)
    keeper.keep(verification(offers))
    assert not Unverified.by_cards(decision, offers, (), store)
    assert not Unverified.untried(decision, offers, store)
    trial(offers, tmp_path / "attnmux")(decision)
    assert not in_process
    failed = (Outcome(case="two", status="failed", message="planted"),)
    keeper.keep(verification(offers, is_complete=False, outcomes=failed))
    assert Unverified.by_cards(decision, offers, (), store)


def test_a_pass_follows_the_files_of_the_plugin(tmp_path, monkeypatch) -> None:
    """Of a wheel, whose RECORD says nothing of an edit, and of an editable install."""
    site, source = tmp_path / "site", tmp_path / "source"
    info = site / "acme_files-1.0.dist-info"
    info.mkdir(parents=True)
    (source / "acme_sources").mkdir(parents=True)
    (info / "METADATA").write_text("Name: acme-files\nVersion: 1.0\n")
    (info / "RECORD").write_text("acme_listed.py,,\nacme_files-1.0.dist-info/METADATA,,\n")
    (info / "entry_points.txt").write_text("[attnmux]\nacme = acme_entry\n")
    direct = {"url": source.as_uri(), "dir_info": {"editable": True}}
    (info / "direct_url.json").write_text(json.dumps(direct))
    files = [
        site / "acme_listed.py",
        site / "acme_entry.py",
        site / "acme_kernels" / "__init__.py",
        site / "acme_kernels" / "deep.so",
        source / "acme_sources" / "a.py",
    ]
    (site / "acme_kernels").mkdir()
    for file in files:
        file.write_text("1\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    card = replace(fake_card(), factory="acme_kernels.deep:make")

    def key() -> str:
        return digest(card, "acme-files", "a fact")

    seen = [key()]
    assert key() == seen[0]
    for file in files:
        file.write_text("12\n")
        seen.append(key())
    os.utime(files[0], ns=(1, 1))
    seen.append(key())
    (source / "acme_sources" / "new.py").write_text("")
    seen.append(key())
    assert len(set(seen)) == len(seen)
    cache = source / "acme_sources" / "__pycache__"
    cache.mkdir()
    (cache / "a.pyc").write_text("")
    assert key() == seen[-1]


def test_the_key_of_a_pass_has_the_options(offers) -> None:
    (offer,) = offers
    platform = probe_cpu()
    assert Passes.key(offer, platform, {}) == Passes.key(offer, platform, {})
    assert Passes.key(offer, platform, {}) != Passes.key(offer, platform, {"a": 1})
    assert Passes.key(offer, platform, {}) != Passes.key(offer, replace(platform, name="other"), {})


def test_without_a_folder_nothing_is_kept(offers, in_process) -> None:
    trial(offers, None)(decided(offers))
    count = len(in_process)
    trial(offers, None)(decided(offers))
    assert len(in_process) == 2 * count
    assert Passes.in_cache(None) == Store(None)
