"""Names that two distributions offer, and the lists that say who is allowed."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest

from attnmux.core import InvalidInput, NoBackend, Offer, Platform, Plugins, Policy, Request, solve
from attnmux.core.facts.errors import UnknownBackend
from attnmux.core.find import plugins as installed
from attnmux.core.find.plugin import Plugin
from attnmux.core.find.plugins import is_admitted
from attnmux.core.plugin import BackendCard, Clause, Prior

CPU = Platform.parse("cpu:x86_64")


def card(name: str, *aliases: str, rank: int = 5) -> BackendCard:
    prior = Prior(rank=rank, source="the test")
    return BackendCard(
        name=name,
        summary="",
        clauses=(Clause.when(),),
        factory="a:b",
        aliases=aliases,
        priors=(prior,),
    )


def plugin(name: str, *cards: BackendCard, distribution: str = "") -> Plugin:
    point = EntryPoint(name, "module", "attnmux")
    return Plugin(point, distribution or f"dist-{name}", "1", cards=cards)


OURS = plugin("cpu", card("torch_native", rank=50), distribution="attnmux-cpu")
IMPOSTOR = plugin("evil", card("torch_native", rank=0))
ALIAS = plugin("alias", card("fast", "torch_native", rank=0))
OTHER = plugin("other", card("fast"))


def winner(*plugins: Plugin, policy: Policy | None = None, **lists: tuple[str, ...]) -> str:
    offers = Plugins(plugins, policy=Policy(**lists)).offers()
    return solve(Request(), CPU, offers, policy).phases["decode"].address


@pytest.mark.parametrize("stranger", [IMPOSTOR, ALIAS])
def test_a_backend_of_this_project_keeps_its_name(stranger) -> None:
    both, named = (OURS, stranger), Policy(backend="torch_native")
    assert winner(*both).startswith(stranger.name)
    assert winner(*both, policy=named) == "cpu/torch_native"
    assert winner(*both, allow=("torch_native",)) == "cpu/torch_native"
    assert winner(*both, policy=Policy(allow=("torch_native",))) == "cpu/torch_native"
    with pytest.raises(UnknownBackend, match=f"dist-{stranger.name} offers another one"):
        winner(stranger, policy=named)
    with pytest.raises(NoBackend):
        winner(stranger, allow=("torch_native",))
    address = f"{stranger.name}/torch_native"
    assert winner(*both, policy=Policy(backend=address)).startswith(stranger.name)
    with pytest.raises(NoBackend):
        winner(*both, deny=("torch_native",))


def test_a_name_of_two_strangers_is_refused_until_one_is_meant() -> None:
    both = (ALIAS, OTHER)
    for policy in (Policy(backend="fast"), Policy(allow=("fast",)), Policy(prefer=("fast",))):
        with pytest.raises(InvalidInput, match="one of alias/fast, other/fast"):
            winner(*both, policy=policy)
    assert winner(*both, policy=Policy(backend="other/fast")) == "other/fast"
    assert winner(*both, policy=Policy(allow=("other/fast",))) == "other/fast"
    with pytest.raises(NoBackend):
        winner(*both, policy=Policy(deny=("fast",)))


@pytest.mark.parametrize(
    ("distribution", "allow", "deny", "admitted"),
    [
        ("attnmux-cpu", None, (), True),
        ("attnmux-cpu", ("attnmux-cpu",), (), True),
        ("Attnmux_CPU", ("cpu",), (), True),
        ("acme", ("attnmux-cpu",), (), False),
        ("acme", (), (), False),
        ("acme", None, ("ACME",), False),
        ("attnmux-cpu", None, ("cpu",), False),
        ("cpu", ("attnmux-cpu",), (), False),
    ],
)
def test_lists_match_distributions(distribution, allow, deny, admitted) -> None:
    assert is_admitted(distribution, allow, deny) is admitted


@pytest.fixture
def configured(monkeypatch):
    """`Plugins.load` with an environment. Returns what it passes on, and its offers."""

    def load(allow=None, deny=(), **environ: str) -> tuple[object, tuple[Offer, ...]]:
        for name, value in environ.items():
            monkeypatch.setenv(f"ATTNMUX_{name}", value)
        seen = []

        def find(allow, deny) -> list[Plugin]:
            seen.append((allow, deny))
            return [OURS, OTHER]

        monkeypatch.setattr(installed, "find_plugins", find)
        monkeypatch.setattr(installed, "manager", lambda: SimpleNamespace(load=lambda each: each))
        offers = Plugins.load(allow, deny).offers()
        return seen[0], offers

    return load


def test_the_environment_s_lists_hold_for_the_library(configured) -> None:
    assert configured()[0] == (None, ())
    assert configured(["a"], ["b"])[0] == (("a",), ("b",))
    lists = {"ALLOW_PLUGINS": "a, b", "DENY_PLUGINS": "c"}
    assert configured(**lists)[0] == (("a", "b"), ("c",))
    assert configured(["b", "d"], ["e"], **lists)[0] == (("b",), ("e", "c"))
    assert configured(["b"], NO_PLUGINS="1")[0] == ((), ("c",))


def test_the_environment_s_backends_hold_for_the_library(configured) -> None:
    _, offers = configured(DENY_BACKENDS="other/fast")
    assert [offer.admitted for offer in offers] == [True, False]
    assert solve(Request(), CPU, offers).phases["decode"].address == "cpu/torch_native"
    with pytest.raises(NoBackend):
        solve(Request(), CPU, offers, Policy(backend="fast"))
