"""What is found on a machine, with plugins that answer, raise, exit and hang."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from attnmux.core import InvalidInput, Platform, Plugins
from attnmux.core.facts.errors import AmbiguousPlatform
from attnmux.core.find import devices as module
from attnmux.core.find import plugins as plugins_module
from attnmux.core.find import probes, unserved
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.find.manager import check_device
from attnmux.core.find.plugin import Plugin, PluginFailure, failure_of

SM90 = Platform.parse("nvidia:sm90,cuda=12.8,count=8")
GFX942 = Platform.parse("amd:gfx942,rocm=6.4")


PROBES: dict[str, Callable[[], object]] = {}


def plugin(name: str, probe: Callable[[], object] | None) -> Plugin:
    """A plugin whose probe is asked in this process."""
    PROBES[name] = probe
    point = EntryPoint(name, f"{name}_module", "attnmux")
    return Plugin(point, f"attnmux-{name}", "0.3", probes=probe is not None)


def answered(plugin: Plugin) -> Plugin:
    try:
        return plugin._replace(platforms=tuple(PROBES[plugin.name]()))
    except BaseException as error:
        return plugin._replace(failures=(failure_of(plugin, "platforms", error),))


@pytest.fixture(autouse=True)
def asked_here(monkeypatch) -> None:
    monkeypatch.setattr(probes, "probe", lambda plugins, seconds: list(map(answered, plugins)))


def raising(error: BaseException) -> Callable[[], object]:
    def probe() -> object:
        raise error

    return probe


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch) -> None:
    monkeypatch.setattr(unserved, "installed_version", lambda name: None)


@pytest.fixture
def empty(tmp_path) -> Path:
    """A machine without devices."""
    return tmp_path


def node(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def drm(root: Path, address: str, vendor: str) -> None:
    """A render node as sysfs shows it."""
    node(root, f"sys/devices/{address}/vendor", f"{vendor}\n")
    link = root / f"sys/class/drm/renderD{128 + len(address)}/device"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(root / f"sys/devices/{address}")


def test_the_cpu_is_always_there_and_last(empty) -> None:
    detection = Plugins().detect(root=empty)
    assert [found.vendor for found in detection.platforms] == ["cpu"]
    assert detection.pick().vendor == "cpu"
    assert not detection.unserved
    assert not detection.failures


def test_the_one_accelerator_is_picked(empty) -> None:
    plugins = Plugins([plugin("nvidia", lambda: [SM90]), plugin("triton", None)])
    detection = plugins.detect(root=empty)
    assert detection.accelerators == (SM90,)
    assert detection.pick() == SM90
    assert detection.pick("cpu").vendor == "cpu"
    assert detection.pick("nvidia:sm90") == SM90
    assert detection.pick(" NVIDIA") == SM90


def test_two_kinds_are_an_error_that_names_both(empty) -> None:
    plugins = Plugins([plugin("nvidia", lambda: [SM90]), plugin("amd", lambda: [GFX942])])
    detection = plugins.detect(root=empty)
    with pytest.raises(AmbiguousPlatform, match="amd:gfx942 and nvidia:sm90"):
        detection.pick()
    assert detection.pick("amd") == GFX942
    assert detection.pick("cpu").vendor == "cpu"


def test_two_architectures_of_one_vendor_are_ambiguous_too(empty) -> None:
    both = [SM90, Platform.parse("nvidia:sm80,cuda=12.8")]
    detection = Plugins([plugin("nvidia", lambda: both)]).detect(root=empty)
    with pytest.raises(AmbiguousPlatform, match="nvidia:sm80 and nvidia:sm90"):
        detection.pick("nvidia")
    assert detection.pick("nvidia:sm80").arch == "sm80"


def test_two_cards_of_one_architecture_are_both_named(empty) -> None:
    cards = [
        replace(SM90, name=name, count=count, memory_bytes=memory)
        for name, count, memory in (("NVIDIA H100", 2, 80), ("NVIDIA H200", 1, 141))
    ]
    picked = Plugins([plugin("nvidia", lambda: cards)]).detect(root=empty).pick()
    assert (picked.name, picked.count) == ("NVIDIA H100 and NVIDIA H200", 3)
    assert picked.memory_bytes == 80


def test_names_are_picked_in_any_case(empty) -> None:
    acme = Platform.parse("Acme:Mark_II,device=acme")
    detection = Plugins([plugin("acme", lambda: [acme])]).detect(root=empty)
    for wanted in ("Acme", "acme", "Acme:Mark_II", "acme:mark_ii"):
        assert detection.pick(wanted) == acme


def test_a_cpu_that_a_plugin_reports_is_last_too(empty) -> None:
    own = Platform.parse("cpu:x86_64,features=of_the_plugin")
    detection = Plugins([plugin("nvidia", lambda: [own, SM90])]).detect(root=empty)
    assert detection.platforms == (SM90, own)


def test_an_absent_platform_cannot_be_picked(empty) -> None:
    with pytest.raises(InvalidInput, match="got 'nvidia'"):
        Plugins().detect(root=empty).pick("nvidia")


@pytest.mark.parametrize("wanted", ["nvidia", "NVIDIA:sm90"])
def test_the_error_mentions_a_missing_plugin(empty, wanted) -> None:
    node(empty, "dev/nvidia0")
    with pytest.raises(InvalidInput, match="pip install attnmux-nvidia"):
        Plugins().detect(root=empty).pick(wanted)


@pytest.mark.parametrize(
    ("probe", "said"),
    [
        (raising(RuntimeError("driver mismatch")), "RuntimeError: driver mismatch"),
        (raising(SystemExit(1)), "SystemExit: 1"),
        (raising(GeneratorExit("a panic")), "GeneratorExit: a panic"),
    ],
)
def test_a_broken_probe_is_a_row_and_the_others_go_on(empty, probe, said) -> None:
    plugins = Plugins([plugin("nvidia", probe), plugin("amd", lambda: [GFX942])])
    detection = plugins.detect(root=empty)
    assert detection.accelerators == (GFX942,)
    (failure,) = detection.failures
    assert (failure.plugin, failure.stage) == ("nvidia", "platforms")
    assert said in failure.error


@pytest.fixture
def stuck(tmp_path):
    """Make a file whose reader waits until the test is over."""
    made = []

    def make(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        made.append(path)
        return path

    yield make
    for path in made:
        os.close(os.open(path, os.O_RDWR))


@pytest.fixture
def quick(monkeypatch):
    """`Plugins.detect`, with a tenth of a second for core's own questions."""
    monkeypatch.setattr(plugins_module, "survey", partial(module.survey, seconds=0.1))
    return Plugins.detect


def test_a_kernel_that_does_not_answer_is_a_row(empty, stuck, quick) -> None:
    stuck(empty / "sys/class/drm/renderD128/device/vendor")
    detection = quick(Plugins([plugin("nvidia", lambda: [SM90])]), root=empty)
    assert detection.accelerators == (SM90,)
    (failure,) = detection.failures
    assert (failure.distribution, failure.stage) == ("attnmux-core", "platforms")
    assert "/dev and /sys" in failure.plugin
    assert "no answer in 0.1 s" in failure.error


def test_a_cpu_that_cannot_be_asked_is_there_and_a_row(empty, stuck, quick, monkeypatch) -> None:
    cpuinfo = stuck(empty / "cpuinfo")
    monkeypatch.setattr(module, "probe_cpu", lambda: probe_cpu(cpuinfo))
    detection = quick(Plugins(), root=empty)
    assert detection.pick().vendor == "cpu"
    assert detection.pick().features == frozenset()
    (failure,) = detection.failures
    assert "the CPU" in failure.plugin
    assert "no answer in 0.1 s" in failure.error
    monkeypatch.setattr(module, "probe_cpu", raising(ImportError("cpuinfo")))
    detection = Plugins().detect(root=empty)
    assert detection.platforms[-1].arch
    assert [row.error for row in detection.failures] == ["ImportError: cpuinfo"]


@pytest.mark.parametrize(
    ("path", "vendor"),
    [
        ("dev/nvidia0", "nvidia"),
        ("dev/nvidia3", "nvidia"),
        ("usr/lib/wsl/lib/libnvidia-ml.so.1", "nvidia"),
        ("usr/lib/wsl/drivers/nv_dispi.inf_amd64_1/libcuda.so.1.1", "nvidia"),
        ("dev/nvhost-gpu", "nvidia"),
        ("dev/nvgpu/igpu0", "nvidia"),
        ("dev/davinci0", "ascend"),
    ],
)
def test_a_device_without_its_plugin_is_named_with_the_pip_line(empty, path, vendor) -> None:
    node(empty, path)
    (device,) = Plugins().detect(root=empty).unserved
    assert (device.vendor, device.evidence) == (vendor, f"/{path}")
    assert "not installed" in device.problem
    assert device.fix == f"pip install attnmux-{vendor}"
    assert device.fix in str(device)


def test_a_plugin_that_is_installed_and_left_out_is_not_to_be_installed(empty, monkeypatch) -> None:
    monkeypatch.setattr(unserved, "installed_version", {"attnmux-nvidia": "0.3"}.get)
    node(empty, "dev/nvidia0")
    (device,) = Plugins().detect(root=empty).unserved
    assert device.problem == "attnmux-nvidia is left out"
    assert "allow_plugins" in device.fix


def test_control_nodes_are_no_devices(empty) -> None:
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "davinci_manager", "kfd"):
        node(empty, f"dev/{name}")
    assert not Plugins().detect(root=empty).unserved


@pytest.mark.parametrize(
    ("address", "vendor", "found"),
    [
        ("0000:03:00.0", "0x8086", True),
        ("0000:00:02.0", "0x8086", False),
        ("0000:00:02.1", "0x8086", False),
        ("0000:03:00.0", "0x10de", False),
    ],
)
def test_a_device_behind_a_render_node(empty, address, vendor, found) -> None:
    drm(empty, address, vendor)
    devices = Plugins().detect(root=empty).unserved
    assert [device.vendor for device in devices] == (["intel"] if found else [])


def test_a_served_device_is_not_reported(empty) -> None:
    node(empty, "dev/nvidia0")
    assert not Plugins([plugin("nvidia", lambda: [SM90])]).detect(root=empty).unserved


def test_a_broken_plugin_is_the_problem(empty) -> None:
    node(empty, "dev/nvidia0")
    failure = PluginFailure(
        plugin="nvidia",
        distribution="attnmux-nvidia",
        version="0.3",
        stage="load",
        error="ImportError: x",
    )
    for plugins, fix in (
        (Plugins(failures=[failure]), "pip install --force-reinstall attnmux-nvidia"),
        (
            Plugins([plugin("nvidia", raising(ImportError("x")))]),
            "repair the driver, its library or the container",
        ),
    ):
        (device,) = plugins.detect(root=empty).unserved
        assert "is broken (ImportError: x)" in device.problem
        assert device.fix.startswith(fix)


def test_a_plugin_that_finds_nothing_is_said_too(empty) -> None:
    node(empty, "dev/nvidia0")
    (device,) = Plugins([plugin("nvidia", lambda: [])]).detect(root=empty).unserved
    assert "found none" in device.problem
    with pytest.raises(InvalidInput, match="found none"):
        Plugins([plugin("nvidia", lambda: [])]).detect(root=empty).pick("nvidia")


def test_devices_that_the_user_hid_are_no_problem(empty) -> None:
    node(empty, "dev/nvidia0")
    loaded = [plugin("nvidia", lambda: [])]

    def problems(text: str) -> list[str]:
        variables = {"CUDA_VISIBLE_DEVICES": text}
        return [
            str(one) for one in Plugins(loaded, variables=variables).detect(root=empty).unserved
        ]

    assert problems("") == problems("-1") == []
    (said,) = problems("7")
    assert "CUDA_VISIBLE_DEVICES=7 may hide it" in said


@pytest.mark.parametrize(
    "changes",
    [{"arch": "z80"}, {"device_type": "xpu"}, {"version": (8, 0)}, {"vendor": "NVIDIA"}],
)
def test_a_vendor_s_own_plugin_reports_its_architectures(changes) -> None:
    check_device("attnmux-nvidia", SM90)
    with pytest.raises(InvalidInput, match="an architecture of nvidia, such as sm80"):
        check_device("attnmux-nvidia", replace(SM90, **changes))


@pytest.mark.parametrize("probe", [lambda: [], raising(RuntimeError("NVML does not start"))])
def test_a_device_that_no_library_sees_can_be_named(empty, probe) -> None:
    node(empty, "dev/nvhost-gpu")
    loaded = [plugin("nvidia", probe)]
    silent = Plugins(loaded).detect(root=empty)
    (device,) = silent.unserved
    assert "or name it, as nvidia:ARCH[,cuda=VERSION] in ATTNMUX_PLATFORM" in str(device)
    for wanted in ("nvidia:sm87", " NVIDIA:sm87,cuda=12.6"):
        detection = Plugins(loaded, named=wanted).detect(root=empty)
        assert detection.pick(wanted) == Platform.parse(wanted.strip())
        assert detection.platforms[-1].vendor == "cpu"
        assert not detection.unserved
    misspelt = Plugins(loaded, named="nvidia:orin").detect(root=empty)
    with pytest.raises(InvalidInput, match="ARCH: sm80, sm90 or sm100"):
        misspelt.pick("nvidia:orin")


def test_a_device_that_is_not_there_cannot_be_named(empty) -> None:
    for found in ([SM90], []):
        plugins = Plugins([plugin("nvidia", lambda found=found: found)], named="nvidia:sm87")
        detection = plugins.detect(root=empty)
        assert detection.accelerators == tuple(found)
        with pytest.raises(InvalidInput, match="got 'nvidia:sm87'"):
            detection.pick("nvidia:sm87")
