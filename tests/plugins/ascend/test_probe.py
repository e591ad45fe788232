"""The Ascend probe on recorded output of `npu-smi info`, with it failing, hanging and absent.

The recorded files say where their layout comes from; `ascend_toolkit_install.info` is the file
that CANN's installer writes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from attnmux.ascend import probe as module
from attnmux.ascend.probe import probe
from attnmux.core import AttnmuxError, Platform

DATA = Path(__file__).parent / "data"


@pytest.fixture
def machine(tmp_path):
    """Device nodes, and PCI devices as {address: id}."""
    root = tmp_path / "root"
    root.mkdir()

    def make(nodes: int, pci: dict[str, str] | None = None) -> Path:
        (root / "dev").mkdir()
        for name in (*map(str, range(nodes)), "_manager"):
            (root / f"dev/davinci{name}").touch()
        for address, number in (pci or {}).items():
            folder = root / "sys/bus/pci/devices" / address
            folder.mkdir(parents=True)
            (folder / "vendor").write_text("0x19e5\n")
            (folder / "device").write_text(f"{number}\n")
        return root

    return make


@pytest.fixture
def npu_smi(tmp_path, monkeypatch):
    """Put a program of that name on the PATH, or none."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    def install(body: str) -> None:
        path = programs / "npu-smi"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    return install


def cann(root: Path, folder: str) -> None:
    path = root / "usr/local/Ascend" / folder / "aarch64-linux/ascend_toolkit_install.info"
    path.parent.mkdir(parents=True)
    path.write_text((DATA / "ascend_toolkit_install.info").read_text())


@pytest.mark.parametrize("folder", ["ascend-toolkit/latest", "cann"])
def test_an_a2_server(machine, npu_smi, folder) -> None:
    root = machine(2)
    cann(root, folder)
    npu_smi(f"/bin/cat {DATA / 'npu-smi-910b.txt'}")
    assert probe(root) == [
        Platform(
            vendor="ascend",
            device_type="npu",
            arch="910b",
            runtime="cann 8.0",
            name="Ascend 910B3",
            count=2,
            memory_bytes=64 * 1024**3,
        )
    ]


@pytest.mark.parametrize("recorded", ["npu-smi-910_93.txt", "npu-smi-910_93-wide.txt"])
def test_an_a3_server_is_told_by_its_pci_device(machine, npu_smi, recorded) -> None:
    npu_smi(f"/bin/cat {DATA / recorded}")
    root = machine(2, {"0000:9d:00.0": "0xd803", "0000:9f:00.0": "0xd803"})
    (found,) = probe(root)
    assert (found.arch, found.count, found.runtime) == ("910_93", 2, "")
    assert found.name == "Ascend910"


def test_a_chip_that_nothing_tells_apart_is_an_error(machine, npu_smi) -> None:
    npu_smi(f"/bin/cat {DATA / 'npu-smi-910_93.txt'}")
    with pytest.raises(AttnmuxError, match=r"'Ascend910' at 0000:9d:00\.0, which this version"):
        probe(machine(2))


def test_a_310p_has_no_hbm(machine, npu_smi) -> None:
    npu_smi(f"/bin/cat {DATA / 'npu-smi-310p.txt'}")
    first, second = probe(machine(2))
    assert (first.arch, first.memory_bytes) == ("310p", 44280 * 1024**2)
    assert (second.arch, second.memory_bytes) == ("310p", 43693 * 1024**2)


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("910B4-1", "910b"),
        ("910B2C", "910b"),
        ("Ascend910B1", "910b"),
        ("910A", "910a"),
        ("910B", "910a"),
        ("910PremiumA", "910a"),
        ("Ascend910_9392", "910_93"),
        ("Ascend950PR", "950"),
    ],
)
def test_names(machine, npu_smi, name, arch) -> None:
    table = (DATA / "npu-smi-910b.txt").read_text().replace("910B3", name)
    npu_smi(f"/bin/cat <<'END'\n{table}END")
    assert [found.arch for found in probe(machine(2))] == [arch]


def test_without_nodes_the_program_is_not_run(machine, npu_smi) -> None:
    npu_smi("exit 9")
    assert probe(machine(0)) == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo 'dcmi module initialize failed. ret is -8005' >&2; exit 255", "255 .* -8005"),
        ("echo 'no device'", "lists no chip, but 1 device nodes exist"),
        ("exec /bin/sleep 30", "no answer in 0.2 s"),
    ],
)
def test_a_program_that_fails_or_hangs_is_an_error(
    machine, npu_smi, monkeypatch, body, said
) -> None:
    monkeypatch.setattr(module, "SECONDS", 0.2)
    npu_smi(body)
    with pytest.raises(AttnmuxError, match=said):
        probe(machine(1))


def test_a_program_that_is_none_is_an_error(machine, npu_smi, tmp_path) -> None:
    npu_smi("")
    (tmp_path / "bin/npu-smi").write_bytes(b"\x7fELF of another machine")
    with pytest.raises(AttnmuxError, match="cannot be run"):
        probe(machine(1))


def test_without_the_program_nodes_are_counted(machine, npu_smi) -> None:
    root = machine(
        3, {"0000:c1:00.0": "0xd802", "0000:c2:00.0": "0xd802", "0000:01:00.0": "0x1822"}
    )
    cann(root, "cann")
    (found,) = probe(root)
    assert (found.arch, found.count, found.memory_bytes) == ("910b", 3, 0)
    assert found.runtime == "cann 8.0"


@pytest.mark.parametrize(
    ("pci", "said"),
    [
        ({}, "shows no NPU that is known"),
        ({"0000:01:00.0": "0xd802", "0000:02:00.0": "0xd500"}, "shows 310p and 910b"),
    ],
)
def test_without_the_program_the_bus_has_to_say_one_thing(machine, npu_smi, pci, said) -> None:
    with pytest.raises(AttnmuxError, match=f"not on the PATH, .* {said}"):
        probe(machine(1, pci))


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 1), ("0,1", 2), ("1", 1), ("0,2", 1), ("0, 1", 1), ("-1", 0), ("", 0), ("0 ,1", 1)],
)
def test_hidden_devices_do_not_count(machine, npu_smi, text, count) -> None:
    root = machine(2)
    npu_smi(f"/bin/cat {DATA / 'npu-smi-910b.txt'}")
    found = probe(root, {"ASCEND_RT_VISIBLE_DEVICES": text})
    assert sum(one.count for one in found) == count
