"""Figures that plugins carry: when they count, and how their files are read.

The figures of `figures/` are invented.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from attnmux.core import (
    InvalidInput,
    Measurement,
    Platform,
    Plugins,
    Policy,
    Request,
    Settings,
    solve_measured,
)
from attnmux.core.measured.nearest import nearest
from attnmux.core.measured.shipped import Shape, Shipped
from attnmux.core.plugin import ANY, Build, Figures
from attnmux.core.verbs import Device, Question

FOLDER = Path(__file__).parent / "figures"
HERE = replace(Platform.parse("nvidia:sm90,cuda=13.0", is_here=True), name="NVIDIA H200")
ASKED = Request.parse("num_q_heads=32,num_kv_heads=8,head_dim=128,dtype=bf16,phases=extend+decode")
WHO = "measured on NVIDIA H200 by attnmux-fake 1.2.3"


@pytest.fixture
def pair(offer):
    figures = tuple(Figures.in_folder(FOLDER))
    two = [offer("usual", rank=10, kv_dtype=ANY), offer("other", rank=20, kv_dtype=ANY)]
    return [replace(each, figures=figures) for each in two]


def solved(offers, platform=HERE, policy=None, measurements=(), **asked):
    return solve_measured(
        ASKED.replace(**asked), platform, offers, policy, measurements=measurements
    )


def chosen(offers, *args, phase="decode", **asked) -> str:
    return solved(offers, *args, **asked).phases[phase].backend


def own(offers, platform=HERE, **times) -> list[Measurement]:
    """What this machine measured of decode."""
    return [
        Measurement(
            backend=each.address,
            phase="decode",
            shape=Measurement.shape_of(Question(request=ASKED, platform=platform, phase="decode")),
            workload="decode:bs=1,ctx=4096",
            device=Device.of(platform),
            versions=each.versions(),
            median_us=times[each.card.name],
            conformant=True,
            date=datetime(2026, 5, 1, tzinfo=timezone.utc),
        )
        for each in offers
        if each.card.name in times
    ]


def test_shipped_figures_overrule_priors_and_say_so(pair) -> None:
    decision = solved(pair)
    assert decision.phases["decode"].backend == "other"
    assert decision.phases["extend"].backend == "usual"
    assert f"{WHO}: 32/8 heads of 128, bfloat16; the fastest of 2" in decision.summary()
    (lost,) = [v for v in decision.candidates if v.phase == "decode" and v.backend == "usual"]
    assert lost.source.endswith("1.58 times as long as fake/other")
    assert chosen([replace(each, figures=()) for each in pair]) == "usual"


def test_this_machines_own_figures_come_first(pair) -> None:
    assert chosen(pair, measurements=own(pair, usual=10.0, other=20.0)) == "usual"
    # One backend's alone compare nothing
    assert chosen(pair, measurements=own(pair, usual=10.0)) == "other"


def test_the_users_policy_comes_before_all(pair) -> None:
    assert chosen(pair, HERE, Policy(decode_backend="usual")) == "usual"
    assert chosen(pair, HERE, Policy(prefer=("usual",))) == "usual"
    assert chosen(pair, HERE, Policy(deny=("other",))) == "usual"


@pytest.mark.parametrize(
    ("platform", "backend"),
    [
        (replace(HERE, runtime="cuda 12.8"), "other"),
        (replace(HERE, name="NVIDIA H100 80GB HBM3"), "usual"),
        (replace(Platform.parse("nvidia:sm80,cuda=13.0"), name="NVIDIA H200"), "usual"),
        (Platform.parse("nvidia:sm90"), "other"),
    ],
)
def test_figures_hold_for_their_kind_of_device(pair, platform, backend) -> None:
    assert chosen(pair, platform) == backend


def test_a_machine_elsewhere_has_shipped_figures_too(pair) -> None:
    assert chosen(pair, Platform.parse("nvidia:sm90")) == "other"


def test_figures_hold_within_their_versions_and_for_their_build(pair) -> None:
    assert chosen([pair[0], replace(pair[1], version="2.0")]) == "usual"
    built = replace(pair[1].card, builds=(Build(name="new", arch=("sm90",)), Build(name="any")))
    assert chosen([pair[0], replace(pair[1], card=built)]) == "usual"


@pytest.mark.parametrize(
    ("asked", "backend"),
    [
        ({"num_q_heads": 28, "num_kv_heads": 4}, "other"),
        ({"dtype": "float16"}, "other"),
        ({"kv_dtype": "fp8_e4m3"}, "usual"),
        ({"head_dim": 256, "num_q_heads": 8, "num_kv_heads": 4}, "usual"),
        # What nobody measured goes by the priors
        ({"head_dim": None}, "usual"),
        ({"lse": True}, "usual"),
    ],
)
def test_the_most_similar_shape_counts(offer, pair, asked, backend) -> None:
    if "lse" in asked:
        wide = [
            offer(e.card.name, r, kv_dtype=ANY, lse=ANY)
            for e, r in zip(pair, (10, 20), strict=True)
        ]
        pair = [replace(each, figures=pair[0].figures) for each in wide]
    assert chosen(pair, phases="decode", **asked) == backend


def test_verified_drafts_have_the_rows_of_their_query_heads() -> None:
    steps = {"verify:bs=16,new=4,prefix=4096": (1.0,)}
    shared, alone = (
        Shape(request=ASKED.replace(num_q_heads=heads), steps=steps) for heads in (32, 8)
    )
    asked = ASKED.replace(num_q_heads=16, phases="extend+verify", spec_topk=1)
    for drafts, expected in ((2, alone), (12, shared)):
        request = asked.replace(spec_draft_tokens=drafts)
        question = Question(request=request, platform=HERE, phase="verify")
        assert nearest([alone, shared], question) is expected
    assert (shared.verified_drafts, Shape(request=ASKED, steps={}).verified_drafts) == (4, 1)


def test_decode_sizes_follow_shipped_figures(pair) -> None:
    decision = solved(pair, head_dim=256, num_q_heads=16)
    assert decision.phases["decode"].backend == "usual"
    (small,) = decision.decode_sizes
    assert (small.least, small.most, small.choice.backend) == (1, 8, "other")


def damaged(tmp_path, change) -> Path:
    data = json.loads((FOLDER / "nvidia-sm90-h200.json").read_text())
    change(data)
    file = tmp_path / "nvidia-sm90-h200.json"
    file.write_text(json.dumps(data))
    return file


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(format=2), "format 2"),
        (lambda data: data.pop("format"), "no 'format'"),
        (lambda data: data.pop("shapes"), "no 'shapes'"),
        (lambda data: data.update(more=1), "unexpected keyword argument 'more'"),
        (lambda data: data["device"].update(name="NVIDIA H100"), "figures of nvidia:sm90 NVIDIA"),
        (lambda data: data["sources"][0].update(backend=5), "backend"),
        (lambda data: data["sources"][0]["versions"].update({"a": "new"}), "a range"),
        (lambda data: data["sources"].pop(), "2 times of decode"),
        (lambda data: data["shapes"][0]["request"].update(head_dim=-1), "head_dim"),
        (lambda data: data["shapes"][0]["steps"].update({"decode": [1.0, 1.0]}), "no workload"),
        (
            lambda data: data["shapes"][0]["steps"].update({"decode:bs=1,ctx=9": [0, 1.0]}),
            "no positive numbers",
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, pair, change, said) -> None:
    file = damaged(tmp_path, change)
    with pytest.raises(InvalidInput, match=said) as caught:
        Shipped.read(file)
    assert str(file) in str(caught.value)
    # A choice goes on without it, and says so
    broken = [replace(each, figures=(Figures.of(file),)) for each in pair]
    decision = solved(broken)
    assert decision.phases["decode"].backend == "usual"
    assert any("figures of attnmux-fake are left out" in note for note in decision.notes)


def test_text_that_is_no_json_is_refused(tmp_path) -> None:
    file = tmp_path / "nvidia-sm90-h200.json"
    file.write_text("{")
    with pytest.raises(InvalidInput, match="JSONDecodeError"):
        Shipped.read(file)
    with pytest.raises(InvalidInput, match="VENDOR-ARCH-PRODUCT"):
        Figures.of(tmp_path / "h200.json")


def test_a_file_is_written_as_it_is_read(tmp_path) -> None:
    read = Shipped.read(FOLDER / "nvidia-sm90-h200.json")
    file = tmp_path / Figures.name_for(HERE)
    file.write_text(json.dumps(read.to_dict()))
    assert Shipped.read(file) == read


def test_no_wheel_carries_invented_figures() -> None:
    """Those that plugins of this repository carry are of a command that measured them."""
    for offer in Plugins.load().offers():
        for each in offer.figures:
            shipped = Shipped.read(Path(each.file))
            assert shipped.command.startswith("attnmux bench --ship")
            assert len(shipped.sources) > 1


def test_a_setting_leaves_shipped_figures_out() -> None:
    assert Plugins.load(settings=Settings()).shipped
    assert not Plugins.load(settings=Settings(no_shipped_figures=True)).shipped
