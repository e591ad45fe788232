from __future__ import annotations

import pickle
from dataclasses import fields

import pytest

from attnmux.core import InvalidInput, Request
from attnmux.core.cards.clause import ALWAYS
from attnmux.core.plugin import (
    ANY,
    NONE,
    BackendCard,
    Clause,
    Option,
    Prior,
    anything_but,
    at_most,
    emulated,
    includes,
    one_of,
    runtimes,
    versions,
)


def test_features_are_refused_unless_declared() -> None:
    limits = {"arch", "version", "features", "runtime", "group_size"}
    limits |= {"num_q_heads", "num_kv_heads", "spec_draft_tokens"}
    for item in fields(Clause):
        if item.name in limits:
            assert item.default == ANY
        elif item.default is not item.default_factory:
            assert item.default in (NONE, item.default)
    plain = Clause(
        **dict.fromkeys(("vendor", "phase", "kind", "dtype"), ANY),
        kv_dtype=ANY,
        page_size=ANY,
        head_dim=ANY,
    )
    assert plain.sinks is NONE
    assert plain.spec_topk is NONE


def test_when() -> None:
    limited = Clause.when(spec_topk=at_most(1))
    assert limited.spec_topk == at_most(1)
    assert limited.sinks is ANY
    assert all(getattr(ALWAYS, item.name) is ANY for item in fields(Clause))
    with pytest.raises(TypeError, match="topk"):
        Clause.when(topk=ANY)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"contract": "one"}, "contract: expected a range"),
        ({"requires": ("torch >> 2",)}, "requires: expected a PEP 508 requirement"),
        ({"requires": (("torch", "a b"),)}, "requires: expected a PEP 508 requirement"),
        ({"requires": (("torch", 2),)}, "requires: expected a PEP 508 requirement, got 2"),
        ({"requires": ("torch", ())}, "requires: expected at least one alternative"),
        (
            {"options": tuple(Option(name="a", type=int, default=n) for n in (1, 2))},
            "options: expected each name once, got ['a', 'a']",
        ),
        ({"factory": "module.Class"}, '"module:attribute"'),
        ({"factory": None}, '"module:attribute"'),
    ],
)
def test_a_card_that_cannot_be_used_is_refused(given, said) -> None:
    with pytest.raises(InvalidInput) as caught:
        BackendCard(**{"name": "x", "summary": "", "clauses": (), "factory": "a:b", **given})
    assert "card 'x'" in str(caught.value)
    assert said in str(caught.value)


def test_sources_are_kept_as_they_were_given() -> None:
    said = {"page_size": "a header"}
    card = BackendCard(name="x", summary="", clauses=(), factory="a:b", sources=said)
    said["page_size"] = "another"
    assert card.sources == {"page_size": "a header"}
    assert pickle.loads(pickle.dumps(card)) == card
    assert hash(card)


def test_clauses_compare_by_their_conditions(clause) -> None:
    assert clause(page_size=one_of(16)) == clause(page_size=one_of(16))
    assert clause(page_size=one_of(16)) != clause(page_size=one_of(32))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": None}, "name: expected text, got None"),
        ({"name": "a/b"}, "name: expected letters, digits, _ and -"),
        ({"name": ""}, "name: expected letters"),
        ({"aliases": "flash"}, "aliases: expected a tuple of str, got 'flash'"),
        ({"aliases": ("a.b",)}, "name: expected letters"),
        ({"companions": "flash"}, "companions: expected a tuple of str"),
        ({"requires": "torch"}, "requires: expected a tuple of str"),
        ({"requires": (3,)}, "requires: expected a tuple of str"),
        ({"clauses": []}, "clauses: expected a tuple of Clause, at most 1000, got []"),
        ({"clauses": ALWAYS}, "clauses: expected a tuple of Clause"),
        ({"clauses": ("any",)}, "clauses: expected a tuple of Clause"),
        ({"options": ("fast",)}, "options: expected a tuple of Option"),
        ({"priors": (3,)}, "priors: expected a tuple of Prior"),
        ({"contract": None}, "contract: expected text"),
        ({"sources": ("a header",)}, "sources: expected a mapping from axes to text"),
        ({"sources": {"pages": "a header"}}, "sources: expected axes of a clause, with text"),
        ({"sources": {"page_size": None}}, "sources: expected axes of a clause, with text"),
    ],
)
def test_a_card_of_other_types_is_refused(given, said) -> None:
    with pytest.raises(InvalidInput) as caught:
        BackendCard(**{"name": "x", "summary": "", "clauses": (), "factory": "a:b", **given})
    assert said in str(caught.value)


def test_a_condition_must_be_one() -> None:
    with pytest.raises(InvalidInput, match="clause, vendor: expected a condition"):
        Clause.when(vendor="acme")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"phase": one_of("prefill", "decode")}, "clause, phase: expected some of extend, decode"),
        ({"kind": one_of("gqa")}, "clause, kind: expected some of mha, mla"),
        ({"dtype": one_of("bf16")}, "clause, dtype: expected some of bfloat16, float16"),
        ({"kv_dtype": one_of("fp8", "bfloat16")}, "clause, kv_dtype: .*, got 'fp8'"),
    ],
)
def test_a_word_that_no_request_uses_is_refused(given, said) -> None:
    """Such a clause would never be asked, and nobody would be told why."""
    with pytest.raises(InvalidInput, match=said):
        Clause.when(**given)


PROBES = {
    "text": anything_but("decode", "mha", "bfloat16"),
    "number": one_of(64),
    "range": at_most(64),
    "flag": one_of(True),
    "features": includes("amx"),
    "runtime": runtimes("cuda>=12"),
    "version": versions(">=9"),
    "page_size": emulated(16, 32),
}
OF_FIELDS = {
    **{name: {"text"} for name in ("Kind", "Dtype")},
    **{name: {"number", "range"} for name in ("Count", "Window", "Measure")},
    "Flag": {"flag"},
}
"""By the type of a request's field of the axis's name, see `facts/values.py`."""
OF_OTHERS = {
    "vendor": {"text"},
    "phase": {"text"},
    "arch": {"text"},
    "version": {"text", "version"},
    "features": {"features"},
    "runtime": {"runtime"},
    "group_size": {"number", "range"},
    "page_size": {"number", "range", "page_size"},
    "tree_windows": {"flag"},
}


@pytest.mark.parametrize("axis", Clause.__slots__)
def test_each_axis_takes_conditions_on_its_own_values(axis) -> None:
    taken = OF_OTHERS.get(axis) or OF_FIELDS[Request.__annotations__[axis]]
    for name, condition in PROBES.items():
        if name in taken:
            assert getattr(Clause.when(**{axis: condition}), axis) is condition
        else:
            with pytest.raises(InvalidInput, match=f"clause, {axis}: expected"):
                Clause.when(**{axis: condition})


@pytest.mark.parametrize("given", [{"rank": "1"}, {"rank": 1, "when": "always"}])
def test_a_prior_of_other_types_is_refused(given) -> None:
    with pytest.raises(InvalidInput, match="prior, "):
        Prior(source="x", **given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": list}, "option 'n', type: expected bool, int, float or str"),
        ({"default": "many"}, "option 'n': expected values of type int"),
        ({"default": True}, "option 'n': expected values of type int"),
        ({"choices": (1, 2.0)}, "option 'n': expected values of type int"),
        ({"choices": (2, 3)}, "option 'n', default: expected one of 2, 3"),
        ({"name": "a=b"}, "option, name: expected letters"),
        ({"least": 2}, "option 'n', default: expected a value of type int, at least 2, got 1"),
        ({"most": 0}, "option 'n', default: expected a value of type int, at most 0, got 1"),
        ({"least": 0.5}, "option 'n': expected values of type int"),
        ({"type": bool, "default": True, "least": 0}, "'n', bounds: expected none"),
    ],
)
def test_an_option_that_cannot_be_read_is_refused(given, said) -> None:
    with pytest.raises(InvalidInput) as caught:
        Option(**{"name": "n", "type": int, "default": 1, **given})
    assert said in str(caught.value)
