"""The AMD probe on recorded machines, with AMD SMI working, failing and absent."""

from __future__ import annotations

import json
import shutil
import sys
from enum import Enum
from pathlib import Path
from types import ModuleType

import pytest

from attnmux.amd.probe import probe
from attnmux.core import AttnmuxError, Platform
from attnmux.core.facts.vendors import VENDORS

DATA = Path(__file__).parent / "data"
MACHINES = json.loads((DATA / "machines.json").read_text())
ANSWERS = json.loads((DATA / "amdsmi.json").read_text())


@pytest.fixture(autouse=True)
def without_libraries(monkeypatch) -> None:
    """Hide AMD SMI and torch's ROCm, whether or not this machine has them."""
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monkeypatch.setattr("attnmux.core.plugin.installed_version", lambda name: None)


@pytest.fixture
def machine(tmp_path):
    def make(name: str) -> Path:
        for path, text in MACHINES[name].items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return make


class AmdSmi(ModuleType):
    """The functions that the probe calls."""

    class AmdSmiMemoryType(Enum):
        VRAM = 0

    def __init__(self, devices, fails: str = "") -> None:
        super().__init__("amdsmi")
        self.devices, self.fails, self.open = devices, fails, 0

    def __getattribute__(self, name: str):
        if name.startswith("amdsmi_") and name == object.__getattribute__(self, "fails"):
            raise RuntimeError(f"{name}: AMDSMI_STATUS_DRIVER_NOT_LOADED")
        return super().__getattribute__(name)

    def amdsmi_init(self) -> None:
        self.open += 1

    def amdsmi_shut_down(self) -> None:
        self.open -= 1

    def amdsmi_get_processor_handles(self) -> list[int]:
        return list(range(len(self.devices)))

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, object]:
        return self.devices[handle]["asic"]

    def amdsmi_get_gpu_memory_total(self, handle: int, kind: Enum) -> int:
        assert kind is self.AmdSmiMemoryType.VRAM
        return self.devices[handle]["memory"]


def test_the_topology_of_an_mi300x_host(machine) -> None:
    assert probe(machine("mi300x")) == [
        Platform(
            vendor="amd",
            device_type="cuda",
            arch="gfx942",
            version=(9, 4, 2),
            runtime="rocm 6.4.1",
            name="AMD Instinct MI300X OAM",
            count=2,
            memory_bytes=206_141_652_992,
            core_count=304,
        )
    ]


def test_a_stepping_is_written_in_hex(machine) -> None:
    (found,) = probe(machine("mi250x"))
    assert (found.arch, found.core_count, found.runtime) == ("gfx90a", 110, "")
    assert found.version == Platform.parse("amd:gfx90a").version


@pytest.mark.parametrize(
    ("number", "arch"),
    [
        (90402, "gfx942"),
        (90500, "gfx950"),
        (90010, "gfx90a"),
        (110000, "gfx1100"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_architectures(machine, number, arch) -> None:
    root = machine("mi250x")
    path = root / "sys/class/kfd/kfd/topology/nodes/1/properties"
    path.write_text(path.read_text().replace("90010", str(number)))
    assert [found.arch for found in probe(root)] == [arch]


def test_two_kinds_are_two_platforms(machine) -> None:
    card, own = probe(machine("two_kinds"))
    assert (card.arch, card.core_count, card.memory_bytes) == ("gfx1100", 96, 25_753_026_560)
    assert (own.arch, own.core_count, own.memory_bytes) == ("gfx1151", 40, 96 * 1024**3)


def test_graphics_that_draw_a_screen_are_left_out(machine) -> None:
    (card,) = probe(machine("desktop"))
    assert (card.arch, card.runtime) == ("gfx1100", "rocm 7.0.0")


@pytest.mark.parametrize(
    ("variables", "archs"),
    [
        ({"HIP_VISIBLE_DEVICES": "1"}, ["gfx1151"]),
        ({"CUDA_VISIBLE_DEVICES": "0"}, ["gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "0"}, ["gfx1151"]),
        ({"ROCR_VISIBLE_DEVICES": "1"}, ["gfx1151"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "0"}, ["gfx1151"]),
        ({"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}, []),
        ({"ROCR_VISIBLE_DEVICES": "GPU-00000000000000ab"}, ["gfx1100"]),
        ({"HIP_VISIBLE_DEVICES": "GPU-ffff"}, []),
        ({"HIP_VISIBLE_DEVICES": "0,0"}, []),
        ({"HIP_VISIBLE_DEVICES": ""}, []),
        ({"HIP_VISIBLE_DEVICES": "0,-1,1"}, ["gfx1100"]),
    ],
)
def test_hidden_devices_do_not_count(machine, variables, archs) -> None:
    root = machine("two_kinds")
    nodes = sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"))
    (first, *_) = [path for path in nodes if "gfx_target_version 110000" in path.read_text()]
    lines = [line for line in first.read_text().splitlines() if "unique_id" not in line]
    first.write_text("\n".join([*lines, "unique_id 171"]))
    assert [found.arch for found in probe(root, variables)] == archs


def test_amdsmi_s_serial_is_the_uuid(machine, monkeypatch) -> None:
    serials = ("0xAB", "0xCD")
    devices = [
        {**ANSWERS["mi300x"], "asic": {**ANSWERS["mi300x"]["asic"], "asic_serial": serial}}
        for serial in serials
    ]
    monkeypatch.setitem(sys.modules, "amdsmi", AmdSmi(devices))
    root = machine("mi300x")
    (found,) = probe(root, {"ROCR_VISIBLE_DEVICES": "GPU-00000000000000cd"})
    assert (found.name, found.count) == ("AMD Instinct MI300X", 1)
    assert [one.count for one in probe(root)] == [2]


@pytest.mark.parametrize("name", sorted(MACHINES.keys() - {"source"}))
def test_core_sees_a_device_where_this_probe_does(machine, name) -> None:
    root = machine(name)
    assert bool(VENDORS["amd"].evidence(root)) is bool(probe(root))


def test_a_processor_s_own_graphics_alone_are_no_reason_to_warn(machine) -> None:
    root = machine("desktop")
    assert VENDORS["amd"].evidence(root) == "/sys/class/kfd/kfd/topology/nodes/1"
    shutil.rmtree(root / "sys/class/kfd/kfd/topology/nodes/1")
    assert VENDORS["amd"].evidence(root) == ""
    assert probe(root) == []


def test_a_cpu_is_no_device_and_no_driver_is_none(machine, tmp_path) -> None:
    assert probe(tmp_path) == []
    assert probe(machine("no_gpu")) == []


def test_a_node_of_another_vendor_is_none_either(machine) -> None:
    assert probe(machine("another_vendor")) == []


def test_a_device_withheld_from_the_container_is_left_out(machine, monkeypatch) -> None:
    root = machine("mi300x")
    withheld = root / "sys/class/kfd/kfd/topology/nodes/3/properties"
    read_text = Path.read_text

    def guarded(self: Path, *args, **kwargs) -> str:
        if self == withheld:
            raise PermissionError(1, "Operation not permitted", str(self))
        return read_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", guarded)
    assert [found.count for found in probe(root)] == [1]


def test_a_topology_that_cannot_be_read_is_an_error(machine) -> None:
    root = machine("mi250x")
    (root / "sys/class/kfd/kfd/topology/nodes/1/properties").unlink()
    with pytest.raises(AttnmuxError, match="cannot be read"):
        probe(root)


def test_a_torch_that_brings_rocm_says_its_version(machine, monkeypatch) -> None:
    monkeypatch.setattr("attnmux.core.plugin.installed_version", {"torch": "2.11.0+rocm7.1"}.get)
    assert [found.runtime for found in probe(machine("mi250x"))] == ["rocm 7.1"]


def test_amdsmi_is_asked_first(machine, monkeypatch) -> None:
    fake = AmdSmi([ANSWERS["mi300x"], ANSWERS["mi300x"], ANSWERS["radeon"]])
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    large, small = probe(machine("mi300x"))
    assert (large.name, large.count, large.core_count) == ("AMD Instinct MI300X", 2, 304)
    assert (small.arch, small.name, small.core_count) == ("gfx1102", "", 0)
    assert fake.open == 0


@pytest.mark.parametrize(
    ("devices", "fails"),
    [
        (["mi300x"], "amdsmi_init"),
        (["mi300x"], "amdsmi_get_processor_handles"),
        (["mi300x"], "amdsmi_get_gpu_asic_info"),
        (["rocm_6_0"], ""),
    ],
)
def test_the_kernel_answers_where_amdsmi_does_not(machine, monkeypatch, devices, fails) -> None:
    fake = AmdSmi([ANSWERS[name] for name in devices], fails)
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    (found,) = probe(machine("mi300x"))
    assert (found.name, found.count) == ("AMD Instinct MI300X OAM", 2)
    assert fake.open == 0


def test_an_architecture_that_is_no_name_is_asked_of_the_kernel(machine, monkeypatch) -> None:
    odd = {**ANSWERS["mi300x"], "asic": {**ANSWERS["mi300x"]["asic"]}}
    odd["asic"]["target_graphics_version"] = "N/A"
    monkeypatch.setitem(sys.modules, "amdsmi", AmdSmi([odd]))
    assert [found.arch for found in probe(machine("mi300x"))] == ["gfx942"]
