"""The kernels of `native` on aarch64, by compilers for it and an emulator, where there are any."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from attnmux.cpu.levels import BASELINE, FLAGS, FOLDER

pytestmark = pytest.mark.full  # compilers take a minute
PROGRAM = Path(__file__).with_name("kernels_alone.cpp")
GCC, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
CLANG = (sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu")


def compiled(*compiler: str, out: Path) -> str:
    """The program, with the flags of the baseline's library."""
    flags = [flag for flag in (*FLAGS, *BASELINE.flags) if flag != "-shared"]
    command = [*compiler, *flags, f"-I{FOLDER}", str(PROGRAM), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return str(out)


@pytest.mark.skipif(not shutil.which(GCC), reason=f"no {GCC}")
def test_the_answers_of_gcc(tmp_path: Path) -> None:
    program = compiled(GCC, "-static", out=tmp_path / "kernels")
    if not shutil.which(EMULATOR):
        pytest.skip(f"compiled; no {EMULATOR} to run it")
    done = subprocess.run([EMULATOR, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not importlib.util.find_spec("ziglang"), reason="no ziglang")
def test_clang_compiles_them(tmp_path: Path) -> None:
    compiled(*CLANG, "-c", out=tmp_path / "kernels.o")
