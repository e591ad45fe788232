"""Which cases run today.

Of a suite of cases, a day runs at least one of each kind and a share of the others. A case of the
conformance suite is of several kinds: a mode with a KV dtype, and each feature with both. Of a test
marked `turns`, cases are of one kind if they differ by nothing but the parameter that `over` names.
Tests that name one `suite` are its cases. Within as many days as the share says, each case runs at
least once. `--full` runs all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any
from zlib import crc32

import pytest

SHARE = 16
"""One in so many cases of a conformance suite, unless its mark says another share."""
MANY_KEYS = 1000
"""Cases with more keys in all their steps represent a kind only if no other case does, and a
quarter of their share runs."""
FEATURES = (
    *("cross_attention", "multi_item", "is_encoder", "has_trees", "spec_topk", "deterministic"),
    *("window_pool", "attention_chunk", "logit_cap", "sinks", "alibi", "relative_reach", "lse"),
    *("kv_scales", "kv_in_pool", "save_kv_cache", "strided_kv", "host_lens", "nan_request"),
    *("graph", "qk_l2norm", "conv_bias", "strong_decay"),
)
"""Fields of cases: having one makes a kind, as lacking it does."""
VALUES = ("page_size", "dtype", "tree_mask")
"""Fields each of whose values makes a kind."""
STRIDE = 7919
"""A prime: in as many days as a suite has cases, each is once the first."""

Kind = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A test that waits for its turn."""

    item: pytest.Item
    kinds: frozenset[Kind]
    share: int
    """It runs every so many days; 0: only for its kinds."""
    is_large: bool = False

    @property
    def number(self) -> int:
        """The same in every process."""
        return crc32(self.item.nodeid.encode())


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run every case")
    today = date.today().toordinal()
    parser.addoption(
        "--day", type=int, default=today, help="run the cases of another day (default: %(default)s)"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: near to a case that always runs; needs --full")
    config.addinivalue_line(
        "markers",
        "turns(share=0, over='', suite=''): run cases by the day, as tests/support/turns.py says",
    )


def pytest_report_header(config: pytest.Config) -> str:
    return "cases: all" if config.getoption("full") else f"cases: --day {config.getoption('day')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests marked `full`, and cases whose turn it is not."""
    if config.getoption("full"):
        return
    left_out = {item for item in items if item.get_closest_marker("full")}
    suites: defaultdict[str, list[Candidate]] = defaultdict(list)
    for item in items:
        if item not in left_out and (found := candidate_of(item)):
            suites[found[0]].append(found[1])
    for candidates in suites.values():
        left_out.update(candidate.item for candidate in candidates)
        left_out.difference_update(chosen(candidates, config.getoption("day")))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether random runs take their whole length."""
    return bool(pytestconfig.getoption("full"))


@pytest.fixture(scope="session")
def day(pytestconfig: pytest.Config) -> int:
    """The number of the day that decides what runs."""
    return int(pytestconfig.getoption("day"))


def candidate_of(item: pytest.Item) -> tuple[str, Candidate] | None:
    """The suite and the candidate; None for a test that always runs. All conformance suites of a
    backend are one."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    mark = item.get_closest_marker("turns")
    given = mark.kwargs | dict(zip(("share",), mark.args, strict=False)) if mark else {}
    if {"candidate", "admitted"} <= params.keys():
        case, suite = params["admitted"], item.nodeid.partition("[")[0]
        is_large = sum(sum(step.lens) for step in case.steps) > MANY_KEYS
        candidate = Candidate(
            item=item,
            kinds=kinds_of(case) | {(suite, phase) for phase in case.phases},
            share=given.get("share", SHARE) * (4 if is_large else 1),
            is_large=is_large,
        )
        return params["candidate"].address, candidate
    if not given or "outside" in params:
        return None
    others = [repr(params[name]) for name in params if name != given.get("over", name)]
    suite = given.get("suite", item.nodeid.partition("[")[0])
    return suite, Candidate(
        item=item, kinds=frozenset([tuple(others)]), share=given.get("share", 0)
    )


def kinds_of(case: Any) -> frozenset[Kind]:
    """Its modes with its KV dtype, and with each of its features."""
    stored = getattr(case, "kv_dtype", None) or case.dtype
    features = {(name, bool(getattr(case, name, None))) for name in FEATURES}
    features |= {(name, getattr(case, name, None)) for name in VALUES}
    features.add(("window", any(getattr(case, "windows", ()))))
    return frozenset(
        (case.kind, phase, stored, *feature) for phase in case.phases for feature in features
    )


def chosen(candidates: Iterable[Candidate], day: int) -> Iterator[pytest.Item]:
    """The items of those that run today: each that is due, and others for the kinds that are left.

    Cases of one share are dealt to its days in turn, so that no day has many more than another.
    Suites that run more often come first.
    """
    ordered = sorted(candidates, key=lambda one: one.number)
    due: set[Candidate] = set()
    for share in {one.share for one in ordered} - {0}:
        due.update([one for one in ordered if one.share == share][-day % share :: share])
    first = day * STRIDE % len(ordered)
    ordered = ordered[first:] + ordered[:first]
    seen: set[Kind] = set()
    for one in sorted(ordered, key=lambda one: (one not in due, one.is_large, one.share)):
        if one in due or not one.kinds <= seen:
            seen |= one.kinds
            yield one.item
