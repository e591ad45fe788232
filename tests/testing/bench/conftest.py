"""A machine with plugins of a test's own, and backends that are slow or wrong."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

from attnmux.core import Offer
from attnmux.core.cli import run as shared
from attnmux.core.find.devices import Detection
from attnmux.core.find.plugin import PluginFailure
from attnmux.testing import FakeBackend, fake_card, fake_platform
from attnmux.testing.bench import Ceilings
from attnmux.testing.bench.cli import bench_run

HERE = replace(fake_platform(), name="a machine")


class Installed:
    """Plugins with a test's own cards."""

    failures: tuple[PluginFailure, ...] = ()
    loaded = ("of-this-test",)

    def __init__(self, offers) -> None:
        self._offers = tuple(offers)

    def offers(self) -> tuple[Offer, ...]:
        return self._offers

    def detect(self) -> Detection:
        return Detection(platforms=(HERE,))


@pytest.fixture
def here():
    """The one platform of the machine."""
    return HERE


@pytest.fixture
def install(monkeypatch):
    """Give the machine one platform, and plugins with these offers alone."""

    def put(*offers: Offer) -> None:
        monkeypatch.setattr(shared.Plugins, "load", lambda **_: Installed(offers))

    return put


@pytest.fixture
def make_offer(monkeypatch):
    """An offer of a backend class, which a card's factory can name."""

    def make(factory: type | None = None, *, name: str = "", card=fake_card, **conditions) -> Offer:
        made = card(**conditions)
        if factory is not None:
            module = ModuleType(f"factory_of_{factory.__name__}")
            setattr(module, factory.__name__, factory)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            made = replace(made, factory=f"{module.__name__}:{factory.__name__}")
        name = name or factory.__name__
        return Offer(
            card=replace(made, name=name),
            plugin="fakes",
            distribution="attnmux-fake",
            version="1.0",
        )

    return make


@pytest.fixture
def known_ceilings(monkeypatch):
    """Skip measuring the device, which takes hundreds of MB and of megaflops."""
    reached = Ceilings(read_gbs=10.0, matmul_tflops=0.5)
    monkeypatch.setattr(bench_run, "ceilings", lambda *_: reached)


@pytest.fixture
def installed(install, make_offer, known_ceilings):
    """Install plugins with these backend classes; FakeBackend alone until it is called."""

    def put(*factories: type, **conditions) -> None:
        install(*(make_offer(factory, **conditions) for factory in factories))

    put(FakeBackend)
    return put


@pytest.fixture(scope="session")
def fakes() -> SimpleNamespace:
    """Backends of which each is slow at a batch size, and one whose answers are wrong."""

    class Slow(FakeBackend):
        """Much more work where it decodes more than one request."""

        def forward_decode(self, call, batch):
            for _ in range(20 if batch.batch_size > 1 else 0):
                super().forward_decode(call, batch)
            return super().forward_decode(call, batch)

    class SlowAlone(FakeBackend):
        """Much more work where it decodes one request."""

        def forward_decode(self, call, batch):
            for _ in range(20 if batch.batch_size == 1 else 0):
                super().forward_decode(call, batch)
            return super().forward_decode(call, batch)

    class Wrong(FakeBackend):
        def attend(self, *args, **kwargs):
            out, lse = super().attend(*args, **kwargs)
            return out * 1.1, lse

    return SimpleNamespace(Slow=Slow, SlowAlone=SlowAlone, Wrong=Wrong)
