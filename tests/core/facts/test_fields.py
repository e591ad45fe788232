"""Fields that check themselves by their types."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Annotated, Any, Literal, Optional

import pytest

from attnmux.core import FrozenMapping, InvalidInput
from attnmux.core.facts.fields import Check, Name, Positive, check_of, read_fields
from attnmux.core.facts.reading import Fact

EVEN = Check("an even number", lambda number: number % 2 == 0)
TODAY = datetime(2026, 11, 30, tzinfo=timezone.utc)


def read_word(name: str, value: Any) -> str:
    if value == "":
        raise InvalidInput(name, got="nothing", expected="a word")
    return str(value).lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Fact):
    noun = "part"

    name: Name
    sizes: tuple[Positive, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole(Fact):
    """Has a field called as a built-in type, which must not hide that type."""

    noun = "whole"

    type: type[int] | type[str] = int
    even: Annotated[int, EVEN] = 2
    word: Annotated[str, read_word] = "x"
    mode: Literal["a", "b"] = "a"
    pair: tuple[str, int] = ("x", 1)
    tags: frozenset[str] = frozenset()
    ratio: float | None = None
    old: Optional[int] = None  # noqa: UP045  # one of the spellings
    nested: Mapping[str, Mapping[str, "bool | int | str"]] = field(  # noqa: UP037  # as above
        default_factory=FrozenMapping
    )
    counts: Annotated[Mapping[str, Positive], Check("counts by name")] = FrozenMapping()
    parts: tuple[Part, ...] = ()
    lazy: Sequence[int] = ()
    part: Part | None = None
    at: datetime = TODAY
    anything: Any = None

    def __post_init__(self) -> None:
        read_fields(self, self.noun)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": float}, "whole, type: expected type or type, got <class 'float'>"),
        ({"even": 3}, "whole, even: expected an even number, got 3"),
        ({"even": True}, "whole, even: expected an even number, got True"),
        ({"word": ""}, "whole, word: expected a word, got nothing"),
        ({"mode": "c"}, "whole, mode: expected one of a, b, got 'c'"),
        ({"mode": []}, "whole, mode: expected one of a, b, got []"),
        ({"pair": ("x",)}, "whole, pair: expected tuple, got ('x',)"),
        ({"pair": ("x", "y")}, "whole, pair: expected tuple, got ('x', 'y')"),
        ({"tags": {"x"}}, "whole, tags: expected a frozenset of str, got {'x'}"),
        ({"tags": frozenset({1})}, "whole, tags: expected a frozenset of str"),
        ({"ratio": "1"}, "whole, ratio: expected float or None, got '1'"),
        ({"ratio": False}, "whole, ratio: expected float or None, got False"),
        ({"old": "1"}, "whole, old: expected int or None, got '1'"),
        ({"nested": {"x": 1}}, "whole, nested of x: expected a mapping, got 1"),
        ({"nested": {"x": {"y": []}}}, "nested of x of y: expected bool or int or str, got []"),
        ({"nested": {1: {}}}, "whole, nested, a key: expected text, got 1"),
        ({"counts": {"x": 0}}, "whole, counts: expected counts by name, got {'x': 0}"),
        ({"parts": [Part(name="a")]}, "whole, parts: expected a tuple of Part, got [Part("),
        ({"part": "a"}, "whole, part: expected Part or None, got 'a'"),
        ({"at": "now"}, "whole, at: expected datetime, got 'now'"),
    ],
)
def test_a_value_of_another_type_is_refused(given, said) -> None:
    with pytest.raises(InvalidInput) as caught:
        Whole(**given)
    assert said in str(caught.value)


def test_facts_are_frozen_to_the_bottom() -> None:
    inner: dict[str, int] = {"splits": 8}
    fact = Whole(nested={"a": inner}, word="LOUD", counts={"x": 1}, ratio=1, old=3)
    inner["splits"] = 4
    assert fact.nested == {"a": {"splits": 8}}
    assert fact.word == "loud"
    assert hash(fact) == hash(pickle.loads(pickle.dumps(fact)))
    with pytest.raises(TypeError):
        fact.nested["a"]["splits"] = 4


def test_a_frozen_mapping_is_kept() -> None:
    kept = FrozenMapping({"a": FrozenMapping({"b": 1})})
    assert Whole(nested=kept).nested is kept


def test_the_elements_of_a_sequence_are_not_read() -> None:
    class Unread(Sequence[int]):
        def __getitem__(self, index):
            raise AssertionError

        __len__ = __getitem__

    assert isinstance(Whole(lazy=Unread()).lazy, Unread)


def test_the_spelling_of_a_type_does_not_matter() -> None:
    """The same check by `Optional` and another order."""
    for hint in (
        Optional[int],  # noqa: UP045  # as above
        int | None,
        None | int,
    ):
        assert check_of(hint).holds(None)
        assert check_of(hint).holds(3)
        assert not check_of(hint).holds("3")


def test_a_reader_of_an_element_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="a whole field"):
        check_of(tuple[Annotated[str, read_word], ...])


def test_plain_data_gives_it_back() -> None:
    fact = Whole(
        nested={"a": {"b": 1}},
        parts=(Part(name="p", sizes=(1, 2)),),
        part=Part(name="q"),
        tags=frozenset("xy"),
        lazy=(1, 2),
        ratio=0.5,
    )
    data = {name: value for name, value in fact.to_dict().items() if name not in ("type", "at")}
    data["pair"] = ("x", 1)
    assert Whole.from_dict({**data, "at": TODAY.isoformat(), "pair": ["x", 1]}) == fact


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (3, "whole: expected its fields by name, got 3"),
        ({"new": 1}, "whole: expected the fields type, even, "),
        ({"part": {}}, "whole, part, name: expected a name, got nothing"),
        ({"part": {"name": "x", "new": 1}}, "whole, part: expected the fields name, sizes, got a"),
        ({"parts": [{"name": ""}]}, "whole, part, name: expected a name, got ''"),
        ({"parts": "x"}, "whole, parts: expected a list, got 'x'"),
        ({"tags": None}, "whole, tags: expected a list, got None"),
        ({"at": "yesterday"}, "whole, at: expected datetime, got 'yesterday'"),
    ],
)
def test_other_plain_data_is_refused(data, said) -> None:
    with pytest.raises(InvalidInput) as caught:
        Whole.from_dict(data)
    assert said in str(caught.value)


def test_a_fact_without_checks_of_its_own_is_checked_as_it_is_read() -> None:
    assert Part(name="").name == ""
    with pytest.raises(InvalidInput, match="part, sizes: expected a tuple of int, got"):
        Part.from_dict({"name": "x", "sizes": [0]})
