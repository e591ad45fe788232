"""Requests ask for graphs where the device has them."""

from __future__ import annotations

import pytest

from attnmux.core import Platform, Request
from attnmux.core.find import graphs
from attnmux.core.find.graphs import has_graphs, with_graphs

HOPPER = Platform.parse("nvidia:sm90")


@pytest.mark.parametrize(("device_type", "has"), [("cuda", True), ("cpu", False), ("xpu", False)])
def test_devices_with_graphs(device_type, has) -> None:
    assert has_graphs(device_type) is has


def test_a_plugin_provides_graphs(monkeypatch) -> None:
    offered = {"attnmux-acme": object()}
    monkeypatch.setattr(graphs, "admitted_points", lambda group, name: offered)
    assert has_graphs("acme")
    offered["attnmux-other"] = object()
    assert not has_graphs("acme")


@pytest.mark.parametrize(
    ("fields", "asks"),
    [
        ("", True),
        ("phases=decode", True),
        ("phases=extend", False),
        ("phases=encoder", False),
        ("kind=gdn", False),
    ],
)
def test_a_phase_that_is_captured_asks(fields, asks) -> None:
    request = with_graphs(Request.parse(fields), HOPPER)
    assert request.graph is asks
    assert request.origins.get("graph", "default") == ("platform" if asks else "default")


def test_what_is_stated_stays() -> None:
    request = Request.parse("graph=yes")
    assert with_graphs(request, HOPPER) is request
    assert with_graphs(Request(), Platform.parse("cpu:x86_64")) == Request()
