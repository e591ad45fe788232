"""Which cases the tests run at which page sizes: see `tests/conftest.py`."""

from __future__ import annotations

from types import SimpleNamespace

from attnmux.testing import find_candidate

SIZES = (1, 16, 64)


class Item(SimpleNamespace):
    __hash__ = object.__hash__


def test_every_name_is_a_case(every_page_size):
    cases = find_candidate("torch_native", device="cpu").cases((16,))
    assert {case.name.removesuffix("-page16") for case in cases} >= every_page_size


def chosen(pytestconfig, names, full=False):
    """The items that stay of those with the names at each page size, in graphs and without."""
    plugins = pytestconfig.pluginmanager.get_plugins()
    conftest = next(plugin for plugin in plugins if hasattr(plugin, "one_page_size"))
    items = [
        Item(
            nodeid=f"test_it.py::TestIt::test_agrees_with_reference[b-{name}-page{size}{end}]",
            get_closest_marker=lambda _: None,
        )
        for size in SIZES
        for name in names
        for end in ("", "-graph")
    ]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    config = SimpleNamespace(getoption=lambda _: full, hook=hook)
    conftest.pytest_collection_modifyitems(config, items)
    return [item.nodeid.partition("[b-")[2][:-1] for item in items]


def test_most_cases_run_once_and_all_page_sizes_are_used(pytestconfig):
    names = [f"extend-feature-{number}" for number in range(30)]
    left = chosen(pytestconfig, names)
    assert len(left) == 2 * len(names)
    for size in SIZES:
        assert 10 <= sum(f"-page{size}-" in f"{name}-" for name in left) <= 30
    for end in ("", "-graph"):
        kept = {name.partition("-page")[0] for name in left if name.endswith("-graph") == bool(end)}
        assert kept == set(names)


def test_cases_of_pages_run_at_all(pytestconfig, every_page_size):
    left = chosen(pytestconfig, every_page_size)
    in_graphs = {name for name in left if name.endswith("-graph")}
    assert len(left) - len(in_graphs) == len(SIZES) * len(every_page_size)
    assert len(in_graphs) == len(every_page_size)
    for size in SIZES:
        assert sum(f"-page{size}-" in name for name in in_graphs) >= 5


def test_numbers_run_without_graphs(pytestconfig):
    names = ["decode-16x2-heads", "extend-dim-64", "decode-float16", "extend-scale"]
    names += [
        "decode-cap",
        "decode-long-cap-lse",
        "decode-fp8_e4m3-window",
        "decode-padding-host-lens",
    ]
    left = chosen(pytestconfig, names)
    assert len(left) == len(names)
    assert not any(name.endswith("-graph") for name in left)


def test_features_that_are_left_out_with_others_run_alone(pytestconfig):
    features = ["decode-fp8_e5m2", "extend-fp8_e5m2-scales", "alibi-decode", "alibi-extend-window"]
    features += ["mla-decode-fp8_e4m3", "extend-empty-prefix-host-lens", "alibi-verify-chain"]
    assert len(chosen(pytestconfig, features)) == 2 * len(features) - 2
    joined = ["decode-fp8_e5m2-window", "alibi-decode-dim-64", "mla-decode-fp8_e5m2"]
    joined += ["extend-empty-prefix-windows-host-lens", "alibi-extend-fp8_e4m3"]
    assert chosen(pytestconfig, joined) == []


def test_full_leaves_nothing_out(pytestconfig):
    names = ["extend-feature", "decode-float16", "decode-fp8_e5m2-window"]
    assert len(chosen(pytestconfig, names, full=True)) == 2 * len(SIZES) * len(names)
