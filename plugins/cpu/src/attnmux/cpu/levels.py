"""The levels of CPUs that the kernels of `native` are built for, and how a level is compiled.

The build hook of the wheel reads this file too: it imports the standard library alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("native")
SOURCE = FOLDER / "attend.cpp"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-shared")
SECONDS = 300.0
"""For the compiler, which takes about 15."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """Instructions that one build of the kernels uses."""

    name: str
    features: tuple[str, ...] = ()
    """Words of `Platform.features` that the CPU must have. Each stands for all of its flags."""
    flags: tuple[str, ...] = ()
    """Flags of the compiler, which switch on these instructions and no others."""

    @property
    def file_name(self) -> str:
        return f"attend-{self.name}.so"

    def command(self, compiler: str, out: Path) -> list[str]:
        """The compiler's command that makes the shared library `out`."""
        return [compiler, *FLAGS, *self.flags, str(SOURCE), "-o", str(out)]


BASELINE = Level(name="baseline")
"""Every CPU of the architecture has it: SSE2 on x86-64, NEON on aarch64."""
AVX2 = Level(name="avx2", features=("avx2",), flags=("-mavx2", "-mfma", "-mf16c"))
AVX512 = Level(
    name="avx512",
    features=(*AVX2.features, "avx512"),
    flags=(*AVX2.flags, "-mavx512f", "-mavx512bw", "-mavx512vl"),
)
BF16 = Level(
    name="avx512_bf16",
    features=(*AVX512.features, "avx512_bf16"),
    flags=(*AVX512.flags, "-mavx512bf16"),
)
AMX = Level(
    name="amx", features=(*BF16.features, "amx"), flags=(*BF16.flags, "-mamx-tile", "-mamx-bf16")
)


def levels_of(arch: str) -> tuple[Level, ...]:
    """The levels of an architecture, the best first."""
    return (AMX, BF16, AVX512, AVX2, BASELINE) if arch == "x86_64" else (BASELINE,)


def shipped(arch: str) -> tuple[Level, ...]:
    """The levels whose libraries were installed with this package, the best first."""
    return tuple(level for level in levels_of(arch) if (FOLDER / level.file_name).is_file())


def serving(arch: str, features: Set[str]) -> Level:
    """The best level that a CPU runs: of those that were installed, or of all."""
    levels = shipped(arch) or levels_of(arch)
    return next(level for level in levels if features >= set(level.features))


def find_compiler() -> str | None:
    return next(filter(None, map(shutil.which, COMPILERS)), None)
