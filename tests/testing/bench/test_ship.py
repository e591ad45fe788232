"""`attnmux bench --ship`: the file that a plugin carries, and how a run goes on with it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner, Result

from attnmux.core import Platform, Policy, Request, solve_measured
from attnmux.core.cli.verbs import verbs
from attnmux.core.plugin import Figures
from attnmux.core.verbs import Shipped
from attnmux.testing import FakeBackend
from attnmux.testing.bench import Workload, recipe, shipping, spot
from attnmux.testing.bench.conformance import Check
from attnmux.testing.bench.recipe import Task, tasks
from attnmux.testing.bench.roofline import cost_of
from attnmux.testing.bench.shipping import Shipping
from attnmux.testing.bench.spot import Spot

SHAPE = Request.from_dict(
    {
        **{"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16},
        **{"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    }
)
STEPS = ("decode:bs=1,ctx=9", "decode:bs=4,ctx=9", "extend:bs=1,new=3")
QUICK = ("--seconds", "0.002", "--check-seconds", "0.05")


class Quick(FakeBackend):
    pass


class Delayed(FakeBackend):
    def forward_decode(self, call, batch):
        for _ in range(5):
            super().forward_decode(call, batch)
        return super().forward_decode(call, batch)


class Wrong(FakeBackend):
    def forward_decode(self, call, batch):
        return super().forward_decode(call, batch).mul_(1.5)


@pytest.fixture
def pair(make_offer, install, monkeypatch):
    """Two backends, and a recipe of three steps."""
    offers = [make_offer(Delayed), make_offer(Quick)]
    install(*offers)
    parsed = [Workload.parse(text) for text in STEPS]
    found = [
        Task(
            request=SHAPE,
            phase=phase,
            workloads=tuple(each for each in parsed if each.phase == phase),
        )
        for phase in ("decode", "extend")
    ]
    monkeypatch.setattr(shipping, "tasks", lambda platform: found)
    return offers


def ship(path, *args: str) -> Result:
    given = ("bench", "--ship", str(path), "--json", *QUICK, *args)
    return CliRunner().invoke(verbs, given, prog_name="attnmux")


def told(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_what_was_measured_changes_the_choice_of_who_carries_it(pair, here, tmp_path) -> None:
    answer = told(ship(tmp_path))
    assert (answer["measured"], answer["left"]) == (3, 0)
    file = tmp_path / Figures.name_for(here)
    shipped = Shipped.read(file)
    assert [source.backend for source in shipped.sources] == ["fakes/Delayed", "fakes/Quick"]
    assert shipped.sources[0].versions == {"attnmux-fake": ">=1.0"}
    assert "decode mha bfloat16" in shipped.sources[0].passed
    assert set(shipped.shapes[0].steps) == {str(Workload.parse(text)) for text in STEPS}
    carried = [replace(each, figures=(Figures.of(file),)) for each in pair]
    decision = solve_measured(SHAPE, here, carried, measurements=())
    assert decision.phases["decode"].backend == "Quick"
    assert "measured on a machine by attnmux-fake 1.0" in decision.summary()


def test_a_run_goes_on_where_the_one_before_ended(pair, here, tmp_path) -> None:
    assert told(ship(tmp_path))["measured"] == 3
    file = tmp_path / Figures.name_for(here)
    data = json.loads(file.read_text())
    left = data["shapes"][0]["steps"]
    kept = left["decode:bs=1,ctx=9"]
    del left["decode:bs=4,ctx=9"]
    file.write_text(json.dumps(data))
    answer = told(ship(file))
    assert (answer["measured"], answer["left"]) == (1, 0)
    steps = Shipped.read(file).shapes[0].steps
    assert steps["decode:bs=1,ctx=9"] == tuple(kept)
    assert len(steps) == 3


def test_figures_of_other_versions_are_not_mixed(pair, install, tmp_path) -> None:
    told(ship(tmp_path))
    install(pair[0], replace(pair[1], version="1.1"))
    result = ship(tmp_path)
    assert result.exit_code == 2
    assert "fakes/Quick with attnmux-fake 1.1" in result.stderr


def test_a_wrong_backend_has_no_figures(pair, install, make_offer, here, tmp_path) -> None:
    install(*pair, make_offer(Wrong))
    answer = told(ship(tmp_path))
    assert any("Wrong" in note for note in answer["notes"])
    shipped = Shipped.read(tmp_path / Figures.name_for(here))
    place = [source.backend for source in shipped.sources].index("fakes/Wrong")
    assert shipped.shapes[0].steps["decode:bs=1,ctx=9"][place] is None


def test_processes_share_a_file(pair, here, tmp_path) -> None:
    """The second one opens the file before the first one has written what it measured."""
    spot = Spot(
        **{"platform": here, "device": "cpu", "offers": tuple(pair), "policy": Policy()},
        **{"seconds": 0.002, "check_seconds": 0.05},
    )
    first, second = (Shipping.open(spot, tmp_path, "", (part, 2)) for part in (0, 1))
    assert [task.phase for task, _ in first.run(1, 0)] == ["decode"] * 2
    assert [task.phase for task, _ in second.run(1, 0)] == ["extend"]
    shipped = Shipped.read(second.file)
    assert set(shipped.shapes[0].steps) == {str(Workload.parse(text)) for text in STEPS}
    assert shipped.sources[0].passed == ("decode mha bfloat16", "extend mha bfloat16")
    assert all(None not in us for us in shipped.shapes[0].steps.values())
    assert not Shipping.open(spot, tmp_path, "").todo()


def test_a_budget_ends_a_run_with_a_step_at_least(pair, here, tmp_path, monkeypatch) -> None:
    """A check may take longer than the budget, and the next run would end in it again."""

    def check(*_):
        clock.extend([1e6])
        return Check(backend="", phase="", passed=1, cases=1)

    clock = [0.0]
    monkeypatch.setattr(shipping, "check_conformance", check)
    monkeypatch.setattr(shipping.time, "monotonic", lambda: clock[-1])
    answer = json.loads(ship(tmp_path).stdout)
    assert (answer["measured"], answer["left"]) == (1, 2)


def test_an_empty_file_is_a_new_one(pair, here, tmp_path) -> None:
    (tmp_path / Figures.name_for(here)).touch()
    assert told(ship(tmp_path))["measured"] == 3


def test_a_lost_device_ends_a_run_by_the_name_of_who_lost_it(
    pair, install, make_offer, here, tmp_path, monkeypatch
) -> None:
    """The next run goes on after the step."""

    def lost(*_, **__):
        raise RuntimeError("an illegal memory access")

    class Breaking(FakeBackend):
        def forward_decode(self, call, batch):
            monkeypatch.setattr(spot.torch, "ones", lost)
            return lost()

    install(make_offer(Breaking))
    monkeypatch.setattr(Shipping, "_passes", lambda *_: True)
    result = ship(tmp_path)
    assert result.exit_code != 0
    assert "fakes/Breaking cannot run here: RuntimeError: an illegal memory access" in result.stderr
    assert "decode:bs=1,ctx=9" in Shipped.read(tmp_path / Figures.name_for(here)).shapes[0].steps


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--share", "3/2"), "none of 1/2 and 2/2"),
        (("--request", "head_dim=64"), "none of them with --ship"),
        (("--keep",), "none of them with --ship"),
        (("--workload", "decode:ctx=9"), "none of them with --ship"),
    ],
)
def test_options_of_one_shape_are_refused(pair, tmp_path, given, said) -> None:
    result = ship(tmp_path, *given)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_file_is_named_for_its_device(pair, tmp_path) -> None:
    result = ship(tmp_path / "mine.json")
    assert result.exit_code == 2
    assert "expected a folder, or " in result.stderr


def test_the_recipe_covers_what_models_have() -> None:
    """Every width by MHA, GQA and MQA, windows and sinks, and MLA, with 16 and with 8 bits."""
    timed = {(each.kv_dtype, each.page_size) for each in recipe.SHAPES}
    assert {("bfloat16", None), ("fp8_e4m3", None)} <= timed
    for kv_dtype in ("bfloat16", "fp8_e4m3"):
        dense = [e for e in recipe.SHAPES if e.kv_dtype == kv_dtype and not e.latent]
        for width in ((64, None), (96, None), (128, None), (192, 128), (256, None)):
            of_width = [e for e in dense if (e.head_dim, e.v_head_dim) == width]
            groups = {(e.num_kv_heads == 1, e.num_q_heads == e.num_kv_heads) for e in of_width}
            assert groups == {(True, False), (False, True), (False, False)}
        features = {(e.sliding_window is not None, e.sinks) for e in dense}
        assert features == {(False, False), (True, False), (False, True), (True, True)}
        latent = {e.num_q_heads for e in recipe.SHAPES if e.kv_dtype == kv_dtype and e.latent}
        assert latent >= {16, 32, 64, 128}


def test_the_recipe_names_each_shape_once_and_keeps_to_the_memory() -> None:
    for shapes in (recipe.SHAPES, recipe.SHAPES_CPU):
        assert len(set(shapes)) == len(shapes)
    large = Platform.parse("nvidia:sm90,memory=141GB")
    small = Platform.parse("nvidia:sm90,memory=8GB")
    assert sum(len(each.workloads) for each in tasks(small)) < sum(
        len(each.workloads) for each in tasks(large)
    )
    for task in tasks(large):
        asked, _ = task.steps
        assert asked.phases == (task.phase,)
        assert all(each.phase == task.phase for each in task.workloads)


def test_prompts_that_wait_for_the_host_are_not_timed() -> None:
    gpu = Platform.parse("nvidia:sm90,memory=141GB")
    prompts = [
        (each, task.request)
        for task in tasks(gpu)
        for each in task.workloads
        if task.phase == "extend"
    ]
    flops = [cost_of(step, request.replace(sliding_window=None)).flops for step, request in prompts]
    assert min(flops) >= recipe.LEAST_FLOPS
    assert {request for _, request in prompts} == set(recipe.SHAPES)
