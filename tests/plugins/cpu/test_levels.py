"""The builds of native's kernels: which serves a CPU, what a wheel has, and their answers."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from zipfile import ZipFile

import pytest

from attnmux.core.find.cpu import probe_cpu
from attnmux.cpu import compiled, levels
from attnmux.cpu.levels import AMX, AVX2, AVX512, BASELINE, BF16, COMPILERS, levels_of, serving
from attnmux.cpu.native import library
from attnmux.testing import Candidate, Case, decode, extend, find_candidate, run_case

HERE = probe_cpu()
RUN_HERE = [each for each in levels_of(HERE.arch) if HERE.features.issuperset(each.features)]
PLUGIN = Path(__file__).parents[3] / "plugins/cpu"
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="no C++ compiler is installed"
)


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (set(), BASELINE),
        ({"avx512"}, BASELINE),
        ({"avx2"}, AVX2),
        ({"avx2", "avx512", "amx"}, AVX512),
        ({"avx2", "avx512", "avx512_bf16"}, BF16),
        ({"avx2", "avx512", "avx512_bf16", "amx", "cxx_compiler"}, AMX),
    ],
)
def test_the_best_level_that_a_cpu_runs(features, level, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(levels, "FOLDER", tmp_path)
    assert serving("x86_64", features) == level
    assert serving("aarch64", features) == BASELINE


def test_only_what_was_installed_serves(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(levels, "FOLDER", tmp_path)
    for level in (AVX2, BASELINE):
        (tmp_path / level.file_name).touch()
    assert serving("x86_64", {"avx2", "avx512"}) == AVX2
    assert serving("x86_64", set()) == BASELINE


@needs_compiler
@pytest.mark.parametrize(
    "level",
    [
        # The best level differs from it by instructions for bfloat16 alone, and the suite runs it
        pytest.param(level, marks=pytest.mark.full) if level is AVX512 else level
        for level in RUN_HERE[1:]  # the suite of native runs the first
    ],
    ids=lambda level: level.name,
)
@pytest.mark.turns(4, suite="compilers")
def test_each_level_that_this_cpu_runs_is_right(level, monkeypatch, request) -> None:
    compiled.library_for.cache_clear()
    request.addfinalizer(compiled.library_for.cache_clear)
    monkeypatch.setattr(compiled, "serving", lambda arch, features: level)
    native: Candidate = find_candidate("native", device="cpu")
    steps = (extend((0, 40), (9, 20)), decode(41, 30, 3))
    for changes in ({"dtype": "float32"}, {}, {"sinks": True, "windows": (8, None)}):
        for kv_dtype in (None, "fp8_e4m3"):
            case = Case(name="level", steps=steps, lse=True, kv_dtype=kv_dtype, **changes)
            outcome = run_case(native, case, seed=3)
            assert outcome.status == "passed", (outcome.message, outcome.reasons)


@needs_compiler
def test_a_library_that_does_not_load_is_compiled_with_a_warning(
    monkeypatch, tmp_path, request, caplog
) -> None:
    compiled.library_for.cache_clear()
    request.addfinalizer(compiled.library_for.cache_clear)
    for module in (levels, compiled):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    (tmp_path / BASELINE.file_name).write_text("no library")
    monkeypatch.setattr(compiled, "_compiled_library", lambda level: level)
    monkeypatch.setattr(library, "bound", lambda made: made)
    assert library.load(replace(HERE, features=frozenset())) == BASELINE
    assert "the kernels of the wheel are not used" in caplog.text


def wheel(folder: Path, **env: str) -> ZipFile:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=PLUGIN, check=True, capture_output=True, env=env)
    (file,) = folder.glob("*.whl")
    return ZipFile(file)


@pytest.mark.skipif(not importlib.util.find_spec("hatchling"), reason="builds with hatchling")
@pytest.mark.parametrize("hooks", ["true", "false"])
def test_without_a_compiler_a_wheel_is_pure(hooks, tmp_path) -> None:
    made = wheel(tmp_path, HATCH_BUILD_HOOKS_ENABLE=hooks, PATH=str(tmp_path))
    names = made.namelist()
    assert "py3-none-any" in Path(str(made.filename)).name
    assert [name for name in names if name.endswith(".so")] == []
    assert "attnmux/cpu/native/attend.cpp" in names


@pytest.mark.skipif(not importlib.util.find_spec("hatchling"), reason="builds with hatchling")
def test_a_wheel_has_what_the_compiler_makes(tmp_path) -> None:
    """All levels but one that this compiler does not know."""
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *amx*) exit 1;; esac\nshift $(($# - 1))\n: > "$1"\n'
    )
    compiler.chmod(0o755)
    folder = tmp_path / "dist"
    made = wheel(folder, HATCH_BUILD_HOOKS_ENABLE="true", PATH=f"{tmp_path}:/usr/bin:/bin")
    expected = {each.file_name for each in levels_of(HERE.arch) if each is not AMX}
    assert {Path(name).name for name in made.namelist() if name.endswith(".so")} == expected
    tag = made.read(next(name for name in made.namelist() if name.endswith("/WHEEL"))).decode()
    assert "Root-Is-Purelib: false" in tag
    assert "Tag: py3-none-any" not in tag
