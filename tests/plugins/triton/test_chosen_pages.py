"""The kernels of chosen pages do what plain torch does."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnmux.core import Platform
from attnmux.parts import RequestPages
from attnmux.parts.page_choice import PlainPages
from attnmux.testing import Case, decode, make_setup

pytest.importorskip("triton")

from attnmux.triton.functions import chosen_pages  # where there is a Triton
from attnmux.triton.functions.chosen_pages import ChosenPages, make_kernels

PLAIN = PlainPages()
LENS = (33, 700, 1, 0, 64, 517)
NUMBER = 4
SHAPES = [
    # (query heads, KV heads, D, Dv, page size, dtype)
    (8, 2, 64, 64, 16, torch.bfloat16),
    (4, 4, 40, 24, 4, torch.float32),
    (6, 1, 128, 128, 64, torch.float16),
    (36, 2, 200, 16, 3, torch.bfloat16),
]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Requests on scattered pages of a pool of random K and V."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lower: torch.Tensor
    upper: torch.Tensor
    requests: RequestPages
    kernels: ChosenPages

    @property
    def bounds(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lower, self.upper


@pytest.fixture(autouse=True)
def seed(record_property) -> None:
    """Fresh at each run; the report of a failure has it."""
    drawn = random.randrange(1 << 30)
    record_property("seed", drawn)
    torch.manual_seed(drawn)
    random.seed(drawn)


@pytest.fixture(params=SHAPES, ids=str)
def setting(request) -> Setting:
    q_heads, heads, dim, v_dim, page, dtype = request.param
    most = -(-max(LENS) // page)
    pages = len(LENS) * most
    # Row 0 is padding's, and a row may end within a page
    table = torch.zeros(len(LENS) + 2, most * page - 1, dtype=torch.int32)
    slots = (torch.randperm(pages) + 1).view(-1, 1) * page + torch.arange(page)
    table[1:-1] = slots.view(len(LENS), -1)[:, : table.shape[1]]
    # Keys that differ less than they are large, so that scores have either sign
    k = torch.randn((pages + 1) * page, heads, dim) / 4 + torch.randn(heads, dim)
    k = k.to(dtype)
    bounds = k.view(pages + 1, page, heads, dim)
    return Setting(
        q=torch.randn(len(LENS), q_heads, dim).to(dtype),
        k=k,
        v=torch.randn((pages + 1) * page, heads, v_dim).to(dtype),
        lower=bounds.amin(1),
        upper=bounds.amax(1),
        requests=RequestPages(
            table=table,
            rows=torch.randperm(len(LENS)) + 1,
            lens=torch.tensor(LENS, dtype=torch.int32),
            page_size=page,
            width=most,
        ),
        kernels=ChosenPages(num_kv_heads=heads, head_dim=dim, v_head_dim=v_dim, page_size=page),
    )


def assert_widened(setting: Setting, loc: torch.Tensor) -> None:
    old = [torch.randn_like(each) for each in setting.bounds]
    mine, theirs = ([each.clone() for each in old] for _ in range(2))
    setting.kernels.widen(setting.k, *mine, loc)
    PLAIN.widen(setting.k, *theirs, loc)
    for found, expected in zip(mine, theirs, strict=True):
        assert torch.equal(found[1:], expected[1:])


def test_bounds_of_prompts(setting):
    """Pieces that begin and end within pages, of requests one after another."""
    requests, pieces = setting.requests, []
    for row, length in zip(requests.rows, LENS, strict=True):
        first = random.randint(0, length)
        pieces.append(requests.table[row, first : random.randint(first, length)])
    assert_widened(setting, torch.cat(pieces).long())


def test_bounds_of_slots_in_any_order(setting):
    loc = torch.randperm(len(setting.k))[: random.randint(1, 300)]
    assert_widened(setting, loc)


def test_bounds_of_a_decode_step(setting):
    page, pages = setting.requests.page_size, torch.randperm(len(setting.lower) - 1)[:20] + 1
    loc = pages * page + torch.randint(page, pages.shape)
    # Those that begin a page, and padding, whose slots are all 0
    loc[::3] = loc[::3] // page * page
    assert_widened(setting, torch.cat([loc, torch.zeros(5, dtype=torch.int64)]))
    assert_widened(setting, loc.repeat_interleave(2)[::2])
    assert_widened(setting, loc[:0])


def test_slots_that_the_pool_lacks_are_skipped(setting):
    old = [each.clone() for each in setting.bounds]
    setting.kernels.widen(setting.k, *setting.bounds, torch.tensor([-1, len(setting.k)]))
    assert all(map(torch.equal, old, setting.bounds))


@pytest.mark.parametrize("apart", [None, 1, 2])
def test_scores(setting, apart):
    """Also of heads, and of columns, that do not lie side by side."""
    gaps = {None: setting.q, 1: setting.q.repeat_interleave(2, 1)[:, ::2]}
    q = gaps.get(apart, setting.q.repeat_interleave(2, 2)[..., ::2])
    found = setting.kernels.score(q, *setting.bounds, setting.requests)
    expected = PLAIN.score(q, *setting.bounds, setting.requests)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def test_scores_of_other_dtypes(setting):
    """A model in float32, with bounds of what the pool stores."""
    q = torch.randn(setting.q.shape)
    found = setting.kernels.score(q, *setting.bounds, setting.requests)
    expected = PLAIN.score(q, *setting.bounds, setting.requests)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


def assert_chosen(setting: Setting, scores: torch.Tensor, number: int) -> torch.Tensor:
    places = setting.kernels.choose(scores, setting.requests, number)
    expected = PLAIN.choose(scores, setting.requests, number)
    assert places.dtype == expected.dtype
    assert bool((places.diff(dim=-1) > 0).all())
    assert torch.equal(
        scores.gather(2, places).sort().values, scores.gather(2, expected).sort().values
    )
    return places


def test_choices(setting):
    scores = PLAIN.score(setting.q, *setting.bounds, setting.requests)
    for number in (NUMBER, random.randint(NUMBER, setting.requests.width)):
        places = assert_chosen(setting, scores, number)
        assert bool((places[:, :, 0] == 0).all())
        for request, count in enumerate(setting.requests.counts.tolist()):
            chosen = set(places[request, 0].tolist())
            assert chosen >= set(range(max(count - 2, 0), min(count, number)))


@pytest.mark.parametrize("values", [1, 2, 5])
def test_choices_among_equal_scores(setting, values):
    """Also of both signs of zero, and of NaN for a query that is none."""
    shape = (len(LENS), setting.q.shape[1], setting.requests.width)
    some = torch.tensor([-0.0, 0.0, -2.5, 1e-40, -torch.inf])[:values]
    scores = some[torch.randint(values, shape)][:, : setting.k.shape[1]]
    order = torch.arange(setting.requests.width)
    beyond = order >= setting.requests.counts.view(-1, 1, 1)
    assert_chosen(setting, scores.masked_fill(beyond, -torch.inf).contiguous(), NUMBER)
    scores = torch.full_like(scores, torch.nan)
    places = setting.kernels.choose(scores, setting.requests, NUMBER)
    assert bool((places.diff(dim=-1) > 0).all())


def test_choices_among_too_many(setting, monkeypatch):
    monkeypatch.setattr(chosen_pages, "MOST_CHOSEN_FROM", 8)
    scores = PLAIN.score(setting.q, *setting.bounds, setting.requests)
    expected = PLAIN.choose(scores, setting.requests, NUMBER)
    assert torch.equal(setting.kernels.choose(scores, setting.requests, NUMBER), expected)


def test_copies(setting):
    """Of full pages and of the last one; nothing else is written."""
    requests, number = setting.requests, 5
    scores = PLAIN.score(setting.q, *setting.bounds, requests)
    places = PLAIN.choose(scores, requests, number)
    page, junk = requests.page_size, 99.0
    shape = ((1 + len(LENS) * number) * page + 7,)
    mine, theirs = (
        [
            torch.full((*shape, *each.shape[1:]), junk, dtype=each.dtype)
            for each in (setting.k, setting.v)
        ]
        for _ in range(2)
    )
    setting.kernels.copy((setting.k, setting.v), tuple(mine), places, requests)
    PLAIN.copy((setting.k, setting.v), tuple(theirs), places, requests)
    is_copied = torch.zeros(shape, dtype=torch.bool)
    for request, count in enumerate(requests.counts.tolist()):
        first = (1 + request * number) * page
        is_copied[first : first + min(count, number) * page] = True
    for found, expected in zip(mine, theirs, strict=True):
        assert torch.equal(found[is_copied], expected[is_copied])
        assert bool((found[~is_copied] == junk).all())
        assert bool((expected[is_copied] != junk).all())


class Operations(TorchDispatchMode):
    """Notes the names of the operations that run, allocations left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "empty" not in func.name():
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_each_is_one_launch(setting):
    requests, kv, loc = setting.requests, (setting.k, setting.v), torch.arange(40)
    scores = setting.kernels.score(setting.q, *setting.bounds, requests)
    places = setting.kernels.choose(scores, requests, NUMBER)
    for run in (
        partial(setting.kernels.widen, setting.k, *setting.bounds, loc),
        partial(setting.kernels.score, setting.q, *setting.bounds, requests),
        partial(setting.kernels.choose, scores, requests, NUMBER),
        partial(setting.kernels.copy, kv, kv, places, requests),
    ):
        with Operations() as ran:
            run()
        assert ran.names == ["attnmux_interpreted::launch"]


def test_steps_without_requests(setting):
    none = replace(setting.requests, rows=setting.requests.rows[:0], lens=setting.requests.lens[:0])
    scores = setting.kernels.score(setting.q[:0], *setting.bounds, none)
    places = setting.kernels.choose(scores, none, NUMBER)
    setting.kernels.copy((setting.k, setting.v), (setting.k, setting.v), places, none)
    assert places.shape == (0, setting.k.shape[1], NUMBER)


def test_made_for_a_context_without_a_change():
    case = Case(name="a step", steps=(decode(9, 2),), page_size=16)
    context = make_setup(case, Platform.parse("nvidia:sm90,cuda=13.0"), "cpu").context
    buffers = context.token_to_kv_pool.get_kv_buffer(context.layers[0].layer_id)
    before = [each.clone() for each in buffers]
    assert isinstance(make_kernels(context), ChosenPages)
    assert all(map(torch.equal, before, buffers))
