"""Which cases run on which day: see `tests/support/turns.py`."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest

import turns
from attnmux.testing import Case, find_candidate
from attnmux.testing.cases.linear import LinearCase

CASES = find_candidate("torch_native", device="cpu").cases((1, 16))


class Item(SimpleNamespace):
    __hash__ = object.__hash__

    def get_closest_marker(self, name):
        return self.marks.get(name)


def of_suite(suite="TestIt", **mark):
    """An item for each case."""
    candidate = SimpleNamespace(address="cpu/torch_native")
    return [
        Item(
            nodeid=f"test_it.py::{suite}::test_agrees_with_reference[{case.name}]",
            callspec=SimpleNamespace(params={"candidate": candidate, "admitted": case}),
            marks={"turns": pytest.mark.turns(**mark).mark} if mark else {},
        )
        for case in CASES
    ]


def of_test(names, **mark):
    """An item for each name in two page sizes."""
    return [
        Item(
            nodeid=f"test_it.py::test_it[{size}-{name}]",
            callspec=SimpleNamespace(params={"size": size, "name": name}),
            marks={"turns": pytest.mark.turns(**mark).mark} if mark else {},
        )
        for size in range(2)
        for name in names
    ]


def left(items, day, *, full=False):
    """Those that run on a day."""
    items, hook = list(items), SimpleNamespace(pytest_deselected=lambda items: None)
    config = SimpleNamespace(getoption={"full": full, "day": day}.get, hook=hook)
    turns.pytest_collection_modifyitems(config, items)
    return items


def kinds_of(items):
    return {kind for item in items for kind in turns.kinds_of(item.callspec.params["admitted"])}


def test_every_field_is_one_of_a_case():
    known = {field.name for cls in (Case, LinearCase) for field in fields(cls)}
    known |= {name for name in dir(Case) if isinstance(getattr(Case, name), property)}
    assert known >= {*turns.FEATURES, *turns.VALUES}


@pytest.mark.parametrize("day", range(3))
def test_a_day_has_every_kind_and_a_share_of_the_others(day):
    items = of_suite()
    chosen = left(items, day)
    assert kinds_of(chosen) == kinds_of(items)
    assert len(chosen) < len(items) / 3


def test_in_as_many_days_as_the_share_says_each_case_runs():
    items = of_suite(share=3)
    assert {item for day in range(12) for item in left(items, day)} == set(items)


def test_a_suite_of_the_same_backend_runs_its_share_and_each_phase():
    usual, rare = of_suite(), of_suite("TestAnother", share=64)
    chosen = left([*usual, *rare], 0)
    assert kinds_of(chosen) == kinds_of(usual)
    rest = [item.callspec.params["admitted"] for item in chosen if item in rare]
    every = {phase for case in CASES for phase in case.phases}
    assert {phase for case in rest for phase in case.phases} == every
    assert len(rest) < len(rare) / 16


def test_cases_that_differ_by_a_parameter_take_turns():
    items = of_test("abc", over="size")
    days = [left(items, day) for day in range(len(items))]
    assert all(sorted(one.callspec.params["name"] for one in day) == [*"abc"] for day in days)
    assert {item for day in days for item in day} == set(items)


def test_a_share_of_few_cases_runs_one():
    items = of_test("abc", share=50)
    assert all(1 <= len(left(items, day)) <= 2 for day in range(20))
    assert {item for day in range(50) for item in left(items, day)} == set(items)


def test_full_runs_all_and_nothing_else_runs_what_is_marked_so():
    near = of_test("ab")[0]
    near.marks["full"] = pytest.mark.full.mark
    items = [*of_suite(), *of_test("abc", share=2), near]
    assert left(items, 3, full=True) == items
    assert near not in left(items, 3)
    unmarked = of_test("abc")
    assert left(unmarked, 3) == unmarked


def test_tests_that_name_a_suite_take_turns():
    alone = [of_test("a", share=3, suite="slow")[0] for _ in range(6)]
    for number, item in enumerate(alone):
        item.nodeid = f"test_{number}.py::test_it"
    days = [left(alone, day) for day in range(3)]
    assert [len(day) for day in days] == [2, 2, 2]
    assert {item for day in days for item in day} == set(alone)
