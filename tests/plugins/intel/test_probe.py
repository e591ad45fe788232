"""The Intel probe on recorded machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnmux.core import Platform
from attnmux.intel import probe as module
from attnmux.intel.probe import FAMILIES, probe

MACHINES = json.loads((Path(__file__).parent / "data/machines.json").read_text())


@pytest.fixture(autouse=True)
def without_libraries(monkeypatch) -> None:
    monkeypatch.setattr("attnmux.core.plugin.installed_version", lambda name: None)


@pytest.fixture
def machine(tmp_path):
    def make(name: str) -> Path:
        drm = tmp_path / "sys/class/drm"
        for card in MACHINES[name]:
            pci = tmp_path / "sys/devices/pci0000:00" / card["address"]
            driver = tmp_path / "sys/bus/pci/drivers" / card["driver"]
            for folder in (pci, driver, drm / card["card"]):
                folder.mkdir(parents=True, exist_ok=True)
            (pci / "vendor").write_text(f"{card['vendor']}\n")
            (pci / "device").write_text(f"{card['device']}\n")
            (pci / "driver").symlink_to(driver)
            (drm / card["card"] / "device").symlink_to(pci)
            for connector in card.get("connectors", ()):
                folder = drm / f"{card['card']}-{connector}"
                folder.mkdir()
                (folder / "device").symlink_to(drm / card["card"])
        return tmp_path

    return make


def test_cards_of_two_generations(machine) -> None:
    battlemage, alchemist = probe(machine("workstation"))
    assert battlemage == Platform(
        vendor="intel",
        device_type="xpu",
        arch="xe2",
        version=(2,),
        name="Intel Battlemage [8086:e20b]",
        count=2,
    )
    assert (alchemist.arch, alchemist.count) == ("xe_hpg", 1)


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ("0", [("xe2", 1)]),
        ("0,1,2", [("xe2", 2), ("xe_hpg", 1)]),
        ("7", []),
        ("7,0", [("xe2", 1)]),  # a number without a device is ignored
        ("0.0", [("xe2", 1)]),
        ("", [("xe2", 2), ("xe_hpg", 1)]),  # an empty mask hides nothing
        ("none", []),
    ],
)
def test_hidden_devices_do_not_count(machine, mask, found) -> None:
    platforms = probe(machine("workstation"), {"ZE_AFFINITY_MASK": mask})
    assert [(one.arch, one.count) for one in platforms] == found


def test_the_numbers_of_flat_devices_are_tiles(machine) -> None:
    root = machine("workstation")
    for card in ("card0", "card1"):
        for tile in ("tile0", "tile1"):
            (root / "sys/class/drm" / card / "device" / tile).mkdir()
    for hierarchy, mask, count in (
        ("FLAT", "0,1", 1),
        ("FLAT", "0,2", 2),
        ("FLAT", "0.0", 0),
        ("COMPOSITE", "0,1", 2),
        ("COMPOSITE", "0.1", 1),
        ("COMPOSITE", "0.2", 0),
    ):
        variables = {"ZE_AFFINITY_MASK": mask, "ZE_FLAT_DEVICE_HIERARCHY": hierarchy}
        assert sum(one.count for one in probe(root, variables)) == count, (hierarchy, mask)


def test_a_processor_s_own_graphics_count_from_xe2(machine) -> None:
    (found,) = probe(machine("lunar_lake"))
    assert (found.arch, found.name) == ("xe2", "Intel Lunar Lake [8086:64a0]")


def test_others_are_left_out(machine, tmp_path) -> None:
    assert probe(tmp_path) == []
    assert probe(machine("others")) == []


def test_a_card_that_goes_away_is_left_out(machine) -> None:
    root = machine("lunar_lake")
    (root / "sys/class/drm/card0/device").unlink()
    assert probe(root) == []


def test_the_runtime_is_the_wheel_s_else_the_installation_s(machine, monkeypatch) -> None:
    root = machine("lunar_lake")
    latest = root / module.ONEAPI_COMPILER
    (latest.parent / "2025.1").mkdir(parents=True)
    latest.symlink_to("2025.1")
    assert [found.runtime for found in probe(root)] == ["oneapi 2025.1"]
    monkeypatch.setattr("attnmux.core.plugin.installed_version", {"intel-sycl-rt": "2025.2.1"}.get)
    assert [found.runtime for found in probe(root)] == ["oneapi 2025.2.1"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_s_architecture_can_be_asked_for(family) -> None:
    assert Platform.parse(f"intel:{family.arch}").device_type == "xpu"
    assert family.ids


def test_no_id_is_in_two_families() -> None:
    numbers = [number for family in FAMILIES for number in family.ids]
    assert len(set(numbers)) == len(numbers)
