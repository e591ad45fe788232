from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.core import InvalidInput
from attnmux.core.choosing.points import joint_examples
from attnmux.core.plugin import (
    ANY,
    NONE,
    anything_but,
    at_least,
    at_most,
    between,
    emulated,
    includes,
    multiple_of,
    one_of,
    runtimes,
    versions,
)


@pytest.mark.parametrize(
    ("condition", "served", "refused", "text"),
    [
        (ANY, [0, "x", True], [], "any"),
        (NONE, [], [0, "x", True], "none"),
        (one_of("a", "b"), ["a", "b"], ["c"], "a or b"),
        (one_of(16, 32, 64), [16, 64], [1, 128], "16, 32 or 64"),
        (one_of(), [], ["a"], "none"),
        (at_most(1), [0, 1], [2], "at most 1"),
        (at_least(2), [2, 99], [1], "at least 2"),
        (between(2, 4), [2, 4], [1, 5], "at least 2, at most 4"),
        (multiple_of(16), [16, 160], [0, 8, 24], "a multiple of 16"),
        (multiple_of(8, most=256), [8, 256], [264], "a multiple of 8, at most 256"),
        (emulated(1), [1, 64], [], "any (1 natively)"),
        (includes("amx"), [frozenset({"amx", "avx2"})], [frozenset()], "amx"),
        (includes("a", "b"), [frozenset("ab")], [frozenset("a")], "a and b"),
        (versions(">=9.0,<10"), ["9.0", "9.4"], ["10.0", "8.9", ""], ">=9.0,<10"),
        (
            runtimes("cuda>=12.3", "rocm>=6"),
            ["cuda 12.3", "rocm 6.4"],
            ["cuda 12.2", "oneapi 2025", "cuda", ""],
            "cuda>=12.3 or rocm>=6",
        ),
    ],
)
def test_admitted_values_and_text(condition, served, refused, text) -> None:
    assert all(condition.admits(value) for value in served)
    assert not any(condition.admits(value) for value in refused)
    assert str(condition) == text
    assert pickle.loads(pickle.dumps(condition)) == condition


def test_any_and_none_stay_themselves() -> None:
    assert pickle.loads(pickle.dumps(ANY)) is ANY
    assert pickle.loads(pickle.dumps(NONE)) is NONE


@pytest.mark.parametrize(
    ("condition", "value", "nearest"),
    [
        (one_of(16, 32, 64), 128, 64),
        (one_of(16, 32, 64), 1, 16),
        (one_of("bfloat16"), "float32", "bfloat16"),
        (at_most(1), 4, 1),
        (multiple_of(16), 20, 32),
        (multiple_of(16, most=64), 65, 64),
        (between(5, 6), 9, 6),
        (multiple_of(16), "x", None),
        (NONE, 3, None),
        (versions(">=9"), "8.0", None),
    ],
)
def test_the_nearest_served_value(condition, value, nearest) -> None:
    assert condition.nearest(value) == nearest


NUMERIC = st.one_of(
    st.lists(st.integers(1, 64), min_size=1, max_size=3).map(lambda values: one_of(*values)),
    st.integers(1, 24).map(multiple_of),
    st.builds(lambda a, b: between(min(a, b), max(a, b)), st.integers(1, 64), st.integers(1, 64)),
    st.integers(1, 64).map(at_least),
    st.lists(st.integers(1, 32), min_size=1, max_size=3).map(lambda values: anything_but(*values)),
    st.just(ANY),
    st.just(emulated(1)),
)


@settings(deadline=None)
@given(NUMERIC, st.integers(1, 200))
def test_nearest_is_served_or_absent(condition, value) -> None:
    near = condition.nearest(value)
    assert near is None or condition.admits(near)


@settings(deadline=None)
@given(st.lists(NUMERIC, min_size=1, max_size=3))
def test_joint_examples_find_a_common_value_where_there_is_one(conditions) -> None:
    common = any(all(c.admits(value) for c in conditions) for value in range(1, 400))
    found = any(all(c.admits(value) for c in conditions) for value in joint_examples(conditions))
    assert found or not common


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (one_of, ([16],), "one_of: expected words or numbers, each as an argument, got [16]"),
        (one_of, ((16, 32),), "each as an argument, got (16, 32)"),
        (one_of, (16, None), "each as an argument, got None"),
        (anything_but, ([1],), "anything_but: expected words or numbers"),
        (emulated, ("1",), "emulated: expected page sizes, each as an argument, got '1'"),
        (multiple_of, (0,), "in steps of 0"),
        (multiple_of, (-8,), "in steps of -8"),
        (at_most, ("16",), "expected numbers, got '16'"),
        (at_most, (-1,), "a range that some number is in"),
        (at_least, (True,), "expected numbers, got True"),
        (between, (9, 3), "got 9 to 3"),
        (includes, (5,), "names of features, each as an argument, got 5"),
        (versions, (9.0,), 'such as ">=9.0,<10", got 9.0'),
        (runtimes, (12,), 'such as "cuda>=12.3", got 12'),
    ],
)
def test_an_invalid_condition_is_refused_when_it_is_written(make, given, said) -> None:
    """Else one plugin's slip would stop every question to all of them."""
    with pytest.raises(InvalidInput) as caught:
        make(*given)
    assert said in str(caught.value)


def test_bad_ranges_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="specifier"):
        versions("about nine")
    with pytest.raises(ValueError, match="cuda"):
        runtimes("cuda ~ 12")


@pytest.mark.parametrize("version", ["v2-beta custom", "unknown"])
def test_a_version_that_cannot_be_read_is_in_no_range(version) -> None:
    assert not versions(">=1").admits(version)
    assert not runtimes("acme>=1").admits(f"acme {version}")
    assert runtimes("acme").admits(f"acme {version}")
