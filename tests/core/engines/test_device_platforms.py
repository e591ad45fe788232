"""A torch device names its platform, with torch's module for its type replaced by a fake."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attnmux.core import (
    Chooser,
    InvalidInput,
    Offer,
    Platform,
    Plugins,
    Settings,
    build,
    solve,
)
from attnmux.core.cli import run as shared
from attnmux.core.engines import chooser
from attnmux.core.engines.device_platforms import check_device
from attnmux.core.facts.errors import AmbiguousPlatform
from attnmux.core.find.devices import Detection
from attnmux.core.verbs import machine
from attnmux.testing import (
    Case,
    decode,
    extend,
    fake_card,
    fake_platform,
    find_candidate,
    make_setup,
)

T4 = replace(Platform.parse("nvidia:sm75,cuda=12.8"), name="Tesla T4")
A6000 = replace(Platform.parse("nvidia:sm86,cuda=12.8"), name="NVIDIA RTX A6000")
A40 = replace(A6000, name="NVIDIA A40", count=2, memory_bytes=40)
CPU = Platform.parse("cpu:x86_64")
BOTH = Detection(platforms=(T4, A6000, CPU))


def cuda(name: str, major: int, minor: int) -> SimpleNamespace:
    """CUDA's builds of torch repeat the name as gcnArchName."""
    numbers = {"major": major, "minor": minor, "total_memory": 7}
    return SimpleNamespace(name=name, gcnArchName=name, **numbers)


def hip(gfx: str) -> SimpleNamespace:
    return SimpleNamespace(name="a card", gcnArchName=gfx, major=9, minor=4, total_memory=7)


class Module:
    """torch's module for one type of device."""

    def __init__(self, *devices: SimpleNamespace, initialised: bool = True) -> None:
        self.devices, self.initialised = devices, initialised

    def is_initialized(self) -> bool:
        return self.initialised

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return self.devices[device.index or 0]


@pytest.fixture
def reports(monkeypatch):
    def use(*devices: SimpleNamespace, initialised: bool = True) -> None:
        fake = Module(*devices, initialised=initialised)
        real = torch.get_device_module
        monkeypatch.setattr(
            torch, "get_device_module", lambda d=None: fake if d.type == "cuda" else real(d)
        )

    return use


MACHINE = (cuda("NVIDIA RTX A6000", 8, 6), cuda("Tesla T4", 7, 5))


@pytest.mark.parametrize("wanted", [None, "nvidia", "nvidia:sm86", "cpu"])
def test_a_device_names_its_platform(reports, wanted) -> None:
    reports(*MACHINE)
    assert Chooser.platform_of(torch.device("cuda:0"), BOTH, wanted) == A6000
    assert Chooser.platform_of(torch.device("cuda:1"), BOTH, wanted) == T4
    assert Chooser.platform_of(torch.device("cuda"), BOTH, wanted) == A6000
    assert Chooser.platform_of(torch.device("cpu"), BOTH, wanted) == CPU


def test_the_card_itself_is_named_among_cards_of_its_architecture(reports) -> None:
    reports(*MACHINE, cuda("NVIDIA A40", 8, 6), cuda("NVIDIA A10", 8, 6))
    detection = Detection(platforms=(A40, A6000, T4, CPU))
    assert Chooser.platform_of(torch.device("cuda:2"), detection, None) == A40
    other = Chooser.platform_of(torch.device("cuda:3"), detection, None)
    assert (other.name, other.count) == ("NVIDIA A40 and NVIDIA RTX A6000", 3)


def test_before_torch_is_initialised_the_setting_names_it(reports) -> None:
    """A process that will fork must not initialise CUDA."""
    reports(*MACHINE, initialised=False)
    with pytest.raises(AmbiguousPlatform, match="nvidia:sm75 and nvidia:sm86"):
        Chooser.platform_of(torch.device("cuda"), BOTH, None)
    assert Chooser.platform_of(torch.device("cuda"), BOTH, "nvidia:sm75") == T4
    assert Chooser.platform_of(torch.device("cuda:0"), BOTH, None) == A6000


def test_a_setting_that_names_nothing_is_an_error(reports) -> None:
    reports(*MACHINE)
    for device in ("cuda:0", "cpu"):
        with pytest.raises(InvalidInput, match=r"attnmux\.toml: expected one of nvidia:sm75"):
            Chooser.platform_of(torch.device(device), BOTH, "nvidai", named="attnmux.toml")


def test_a_device_that_no_probe_finds_is_as_torch_reports_it(reports) -> None:
    reports(cuda("Orin", 8, 7))
    alone = Detection(platforms=(CPU,))
    found = Chooser.platform_of(torch.device("cuda:0"), alone, None)
    assert (str(found), found.name) == ("nvidia:sm87,memory=7B", "Orin")
    stated = Chooser.platform_of(torch.device("cuda"), alone, "nvidia:sm87,cuda=12.6")
    assert (stated.runtime, stated.name) == ("cuda 12.6", "Orin")
    with pytest.raises(InvalidInput, match="expected one of cpu; if the device is there, name it"):
        Chooser.platform_of(torch.device("xpu"), alone, None)


def test_an_engine_s_device_that_no_probe_finds_can_be_named(reports) -> None:
    reports(cuda("Orin", 8, 7), initialised=False)
    alone = Detection(platforms=(CPU,))
    stated = Chooser.platform_of(torch.device("cuda"), alone, "nvidia:sm87,cuda=12.6")
    assert str(stated) == "nvidia:sm87,cuda=12.6"
    with pytest.raises(InvalidInput, match="got 'nvidia:sm86'"):
        Chooser.platform_of(torch.device("cuda:0"), alone, "nvidia:sm86")
    with pytest.raises(InvalidInput, match="got 'nvidia:sm87'"):
        Chooser.platform_of(torch.device("cpu"), alone, "nvidia:sm87")


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        (cuda("Tesla T4", 7, 5), "nvidia:sm75"),
        (cuda("NVIDIA GB10", 12, 1), "nvidia:sm121"),
        (hip("gfx942:sramecc+:xnack-"), "amd:gfx942"),
        (hip("gfx1100"), "amd:gfx1100"),
    ],
)
def test_the_vendor_is_told_by_the_properties(reports, facts, text) -> None:
    reports(facts)
    assert str(Chooser.reported_device(torch.device("cuda:0"))) == text


def test_the_cpu_and_a_device_without_a_driver_are_not_reported() -> None:
    assert Chooser.reported_device(torch.device("cpu")) is None
    if not torch.cuda.is_available():
        assert Chooser.reported_device(torch.device("cuda:0")) is None


def test_a_decision_for_another_architecture_is_refused(reports) -> None:
    reports(*MACHINE)
    card = replace(fake_card(), name="one")
    case = Case(name="device", steps=(extend((0, 5)), decode(6)))
    context = replace(make_setup(case, A6000, "cpu").context, device=torch.device("cuda:1"))
    decision = solve(case.request, fake_platform(), [Offer(card=card, plugin="fakes")])
    decision = replace(decision, platform=A6000)
    with pytest.raises(InvalidInput) as refusal:
        build(decision, context)
    for part in (
        "context.device: expected nvidia:sm86",
        "ATTNMUX_PLATFORM=nvidia:sm75",
        "got cuda:1, which torch reports as nvidia:sm75 (Tesla T4)",
    ):
        assert part in str(refusal.value)
    assert build(decision, replace(context, device=torch.device("cuda:0")))


def test_what_cannot_be_compared_is_not_refused(reports) -> None:
    reports(*MACHINE)
    check_device(torch.device("cuda:1"), T4)
    check_device(torch.device("cuda:1"), replace(T4, arch="sm75a"))
    check_device(torch.device("cpu"), A6000)  # tensors of an emulator
    check_device(torch.device("cuda:1"), Platform.parse("acme:m1,device=cuda,version=1.0"))


def test_a_backend_is_verified_on_the_device_s_platform(reports) -> None:
    reports(*MACHINE)
    name = Plugins.load().offers()[0].address
    for device, platform in (("cuda:1", T4), ("cuda:0", A6000)):
        found = find_candidate(name, device=device, platforms=BOTH.platforms)
        assert found.platform == platform


def test_a_verb_s_device_names_the_platform(reports, monkeypatch) -> None:
    reports(*MACHINE)
    monkeypatch.setattr(shared.Plugins, "detect", lambda plugins: BOTH)
    run = shared.Run()
    for device, platform in (("cuda:1", T4), ("cuda:0", A6000)):
        assert machine(run, Settings(), Plugins(), None, device=device) == platform
    with pytest.raises(AmbiguousPlatform):
        machine(run, Settings(), Plugins(), None)


def test_an_engine_s_device_names_the_platform(reports, monkeypatch) -> None:
    reports(*MACHINE)
    monkeypatch.setattr(chooser.Plugins, "detect", lambda plugins: BOTH)
    assert Chooser.here("cuda:1").platform == T4
    assert Chooser.here(torch.device("cuda:0")).platform == A6000
    assert Chooser.here("cpu").platform == CPU
