from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from attnmux.core.find import cpu as module
from attnmux.core.find.cpu import probe_cpu

SAPPHIRE_RAPIDS = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480C
flags\t\t: fpu sse4_2 avx f16c fma avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16 avx512_vnni \
amx_bf16 amx_tile amx_int8

processor\t: 1
model name\t: Intel(R) Xeon(R) Platinum 8480C
flags\t\t: fpu
"""
SKYLAKE = SAPPHIRE_RAPIDS.replace("avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8", "")
GRAVITON = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd sve bf16
CPU implementer\t: 0x41
"""


def probed(folder: Path, cpuinfo: str | None, limit: str | None = None):
    if cpuinfo is not None:
        (folder / "cpuinfo").write_text(cpuinfo)
    if limit is not None:
        (folder / "memory.max").write_text(limit)
    return probe_cpu(folder / "cpuinfo", folder / "memory.max")


@pytest.mark.parametrize(
    ("cpuinfo", "name", "features"),
    [
        (
            SAPPHIRE_RAPIDS,
            "Intel(R) Xeon(R) Platinum 8480C",
            {"avx2", "avx512", "avx512_bf16", "avx512_vnni", "amx"},
        ),
        (SKYLAKE, "Intel(R) Xeon(R) Platinum 8480C", {"avx2", "avx512"}),
        (SKYLAKE.replace(" fma", ""), "Intel(R) Xeon(R) Platinum 8480C", {"avx512"}),
        (GRAVITON, "", {"neon", "sve", "bf16"}),
        ("", "", set()),
    ],
)
def test_features(tmp_path, monkeypatch, cpuinfo, name, features) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    found = probed(tmp_path, cpuinfo)
    assert found.features - {"cxx_compiler"} == features
    assert (found.name, found.vendor, found.device_type) == (name, "cpu", "cpu")


def test_a_compiler_on_the_path_is_a_feature(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "cxx_compiler" not in probed(tmp_path, GRAVITON).features
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert "cxx_compiler" in probed(tmp_path, GRAVITON).features


def test_memory_is_limited_by_the_container(tmp_path) -> None:
    whole = probed(tmp_path, "").memory_bytes
    assert whole > 0
    assert probed(tmp_path, "", "max\n").memory_bytes == whole
    assert probed(tmp_path, "", "1048576\n").memory_bytes == 1048576
    assert probed(tmp_path, "", str(whole * 2)).memory_bytes == whole


def test_this_machine() -> None:
    found = probe_cpu()
    assert found.arch
    assert found.core_count >= 1


def test_without_proc_another_library_is_asked(tmp_path, monkeypatch) -> None:
    library = ModuleType("cpuinfo")
    library.get_cpu_info = lambda: {"flags": ["avx2", "f16c", "fma"], "brand_raw": "A Chip"}
    monkeypatch.setitem(sys.modules, "cpuinfo", library)
    monkeypatch.setattr(module.sys, "platform", "darwin")
    found = probed(tmp_path, SAPPHIRE_RAPIDS)
    assert found.name == "A Chip"
    assert found.features - {"cxx_compiler"} == {"avx2"}


@pytest.mark.parametrize(
    ("machine", "arch"), [("AMD64", "x86_64"), ("arm64", "aarch64"), ("aarch64", "aarch64")]
)
def test_one_name_for_an_architecture(tmp_path, monkeypatch, machine, arch) -> None:
    monkeypatch.setattr(module.platform, "machine", lambda: machine)
    assert probed(tmp_path, "").arch == arch
