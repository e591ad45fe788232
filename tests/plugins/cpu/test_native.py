"""The C++ backend."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attnmux.core import BackendFailed, Plugins, Request, Settings, solve
from attnmux.core.cli.verbs import verbs
from attnmux.core.find.cpu import probe_cpu
from attnmux.cpu import compiled as kernels
from attnmux.cpu import levels
from attnmux.cpu.compiled import library_for
from attnmux.cpu.levels import COMPILERS, serving
from attnmux.cpu.native.library import TYPES, Call, Keys, load
from attnmux.testing import AttentionBackendTests

HERE = probe_cpu()
ASKED = Request.parse("num_q_heads=8,num_kv_heads=2,head_dim=64,dtype=bf16")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, COMPILERS)), reason="no C++ compiler is installed"
)


@needs_compiler
class TestNative(AttentionBackendTests):
    backend = "native"
    device = "cpu"


@needs_compiler
@pytest.mark.parametrize("tokens", [1, 3, 7, 12, 20])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_each_8_bit_float_is_read_exactly(dtype: torch.dtype, tokens: int) -> None:
    stored = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.bfloat16)
    stored = stored.where(stored.isfinite(), 0)
    values, keys = stored.to(dtype).view(1, 1, 256), torch.zeros(1, 1, 256).to(dtype)
    q, out = torch.zeros(2, tokens, 1, 256, dtype=torch.bfloat16)
    qo_indptr, ones = torch.tensor([0, tokens], dtype=torch.int32), torch.ones(tokens).long()
    span_indptr, zeros = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(tokens).long()
    places = {"span_start": zeros.int(), "slots": zeros.int(), "first": zeros, "end": ones}
    places |= {"qo_indptr": qo_indptr, "span_indptr": span_indptr}
    pointers = {name: each.data_ptr() for name, each in places.items()}
    load(HERE)(
        Call(
            keys=Keys(num_requests=1, **pointers),
            **{name: each.data_ptr() for name, each in zip("qkv", (q, keys, values), strict=True)},
            **{name: 256 for name in ("q_token", "q_head", "k_slot", "k_head", "v_slot", "v_head")},
            **{"out": out.data_ptr(), "out_token": 256, "out_head": 256, "num_tokens": tokens},
            **{"num_heads": 1, "num_kv_heads": 1, "D": 256, "Dv": 256, "num_threads": 1},
            **{"q_type": TYPES[q.dtype], "kv_type": TYPES[dtype], "scaling": 1.0, "v_scale": 1.0},
        )
    )
    assert out.equal(stored.expand_as(out))


@pytest.fixture
def broken_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The only compiler refuses every program."""
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho 'error: no room' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(levels, "COMPILERS", (str(compiler),))
    library_for.cache_clear()
    yield
    library_for.cache_clear()


@pytest.mark.parametrize(
    ("features", "chosen"),
    [({"avx2", "cxx_compiler"}, "native"), ({"avx2"}, "torch_native")],
)
def test_it_is_chosen_where_a_compiler_is(features: set[str], chosen: str) -> None:
    offers = [offer for offer in Plugins.load().offers() if offer.plugin == "cpu"]
    decision = solve(ASKED, replace(HERE, features=frozenset(features)), offers)
    assert {choice.backend for choice in decision.phases.values()} == {chosen}


@pytest.mark.usefixtures("broken_compiler")
def test_a_compiler_that_fails_is_an_error_with_its_words() -> None:
    with pytest.raises(BackendFailed, match=r"error: no room.*torch_native"):
        load(HERE)


@needs_compiler
@pytest.mark.usefixtures("broken_compiler")
def test_where_the_compiler_fails_the_next_backend_serves() -> None:
    pytest.importorskip("attnmux.transformers")
    given = ["generate", "k417, x90 ?k", "--max-new-tokens", "8", "--device", "cpu"]
    result = CliRunner().invoke(verbs, given)
    assert result.stdout == "417\n", result.output
    assert "error: no room" in result.stderr
    assert "instead torch_native (cpu) serves extend and decode" in result.stderr
    named = CliRunner().invoke(verbs, [*given, "--backend", "native"])
    assert named.exit_code == 3
    assert "install g++ 12 or later" in named.stderr


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Path]:
    """What other tests have compiled; from then on a compiler copies it."""
    library_for.cache_clear()
    load(HERE)
    caplog.clear()
    path = kernels._place(serving(HERE.arch, HERE.features))
    monkeypatch.setattr(kernels, "_run", lambda command: shutil.copy(path, command[-1]))
    library_for.cache_clear()
    yield path
    library_for.cache_clear()


@needs_compiler
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.usefixtures("compiled")
def test_the_library_is_compiled_once_and_nothing_else_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kept: bool
) -> None:
    scratch, cache = tmp_path / "scratch", tmp_path / "cache"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setattr(Settings, "cache_folder", lambda self: cache if kept else None)
    for _ in range(1 + kept):
        library_for.cache_clear()
        assert callable(load(HERE))
    library_for.cache_clear()
    assert not list(scratch.iterdir())
    assert sorted(file.suffix for file in cache.glob("*")) == [".lock", ".sha256", ".so"] * kept
    assert caplog.text.count("compiling the kernels") == 1


@needs_compiler
def test_who_needs_the_library_waits_for_the_compiler_that_began(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiled: Path,
) -> None:
    commands: list[list[str]] = []
    began, goes_on = threading.Event(), threading.Event()

    def run(command: list[str]) -> None:
        commands.append(command)
        began.set()
        assert goes_on.wait(60)
        shutil.copy(compiled, command[-1])

    monkeypatch.setattr(kernels, "_run", run)
    monkeypatch.setattr(Settings, "cache_folder", lambda self: tmp_path)
    kernels.begin(HERE)
    assert began.wait(60)
    kernels.begin(HERE)  # nothing: one compiler runs
    threading.Timer(0.3, goes_on.set).start()
    assert kernels.is_made(HERE)
    assert goes_on.is_set()
    assert not caplog.text
    assert callable(load(HERE))
    kernels.begin(HERE)  # nothing: the library is there
    assert len(commands) == 1


@pytest.mark.usefixtures("broken_compiler")
def test_a_compiler_that_began_and_failed_is_an_error_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Settings, "cache_folder", lambda self: tmp_path)
    monkeypatch.setattr(kernels, "FOLDER", tmp_path / "wheel")
    kernels.begin(HERE)
    assert not kernels.is_made(HERE)
    with pytest.raises(BackendFailed, match=r"error: no room.*torch_native"):
        load(HERE)
    assert caplog.text.count("compiling the kernels") == 1


def put(path: Path, content: bytes) -> None:
    """A file in place of the one that this process has loaded, which would end with a bus error if
    its pages went."""
    path.unlink()
    path.write_bytes(content)


def damage(path: Path) -> None:
    put(path, b"no library")


def append(path: Path) -> None:
    put(path, path.read_bytes() + b"more")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    put(path, content)


def open_to_a_group(path: Path) -> None:
    path.chmod(0o770)


def unseal(path: Path) -> None:
    path.with_suffix(".sha256").unlink()


@needs_compiler
@pytest.mark.parametrize("change", [damage, append, flip, open_to_a_group, unseal])
def test_a_library_that_is_not_as_it_was_written_is_compiled_again(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiled: Path,
    change: Callable[[Path], None],
) -> None:
    kept = tmp_path / compiled.name
    monkeypatch.setattr(Settings, "cache_folder", lambda self: tmp_path)
    assert callable(load(HERE))
    change(kept)
    library_for.cache_clear()
    caplog.clear()
    assert callable(load(HERE))
    assert kept.read_bytes() == compiled.read_bytes()
    assert caplog.text.count("compiling the kernels") == 1
    assert (f"{kept} cannot be loaded" in caplog.text) is (change is not unseal)


@needs_compiler
def test_levels_of_one_process_have_their_own_kernels() -> None:
    """A loader takes a library of a name that it has seen for the same one."""
    platforms = [replace(HERE, features=HERE.features & {"avx2", "cxx_compiler"}), HERE]
    for platform in platforms:
        library_for(platform)  # compiled and kept
    library_for.cache_clear()
    handles = {library_for(platform)._handle for platform in platforms}
    names = {serving(platform.arch, platform.features).name for platform in platforms}
    assert len(handles) == len(names)


COMPILES = """
import signal, sys, tempfile, time
from pathlib import Path
tempfile.tempdir = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)
from attnmux.core.find.cpu import probe_cpu
from attnmux.cpu import compiled as kernels
from attnmux.cpu import levels
from attnmux.cpu import compiled
levels.COMPILERS = (sys.argv[2],)
compiled.FOLDER = Path(sys.argv[1], "wheel")
platform = probe_cpu()
if sys.argv[3] == "begins":
    compiled.begin(platform)
    time.sleep(600)
compiled.library_for(platform)
"""


@pytest.mark.parametrize("how", ["waits", "begins"])
def test_an_interrupted_compile_leaves_nothing_running_or_behind(tmp_path: Path, how: str) -> None:
    scratch, started = tmp_path / "scratch", tmp_path / "pid"
    scratch.mkdir()
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {started}\nwait\n")
    compiler.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-c", COMPILES, str(scratch), str(compiler), how],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not (started.exists() and started.read_text()):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(60)
    assert not list(scratch.iterdir())
    assert {path.suffix for path in (tmp_path / "cache").rglob("*.*")} <= {".lock"}
    end = time.monotonic() + 30  # a process that was killed may wait for a core to end
    while runs(started.read_text().strip()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not runs(started.read_text().strip())


def runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
