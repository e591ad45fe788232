"""Tests ignore the configuration, variables and measurements of this machine's user."""

from __future__ import annotations

import gc
import logging
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile
from zipfile import Path as ZipPath

import pytest
from packaging.version import Version

# Triton reads it when it is imported, which torch's compiler does too
os.environ.setdefault("TRITON_INTERPRET", "1")
# So does torch: workers fill the cores, where more threads would wait for one another
os.environ.setdefault("OMP_NUM_THREADS", "1")
# And inductor, which would start processes that import torch, to compile kernels of GPUs
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# transformers compiles more patterns for its checkpoints than `re` keeps
re._MAXCACHE = 8192


pytest_plugins = ["turns", "gaps"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "transformers(release): needs that release of transformers, or a later one"
    )
    with suppress(ImportError):  # engines' own environments have none
        from hypothesis import settings  # noqa: PLC0415  # as above

        settings.register_profile("full", max_examples=150, deadline=None)
        settings.register_profile("short", max_examples=30, deadline=None)
        settings.load_profile("full" if config.getoption("full") else "short")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of models that the installed transformers does not serve yet."""
    for item in items:
        if mark := item.get_closest_marker("transformers"):
            needed, there = mark.args[0], version("transformers")
            if Version(there) < Version(needed):
                why = f"needs transformers {needed}, got {there}"
                item.add_marker(pytest.mark.skip(reason=why))


def pytest_sessionstart() -> None:
    """Make the thousands of tests without collecting garbage, which would add half the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave the tests out of every later collection of garbage, and torch's loggers to the root.

    In each test pytest gives handlers to every logger that does not propagate, six times, and torch
    has dozens of them.
    """
    for name, logger in logging.Logger.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.partition(".")[0] == "torch":
            logger.propagate = True
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Leave what a file imported out as well, once its fixtures are gone."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


COMPILER = """#!/bin/sh
case "$*" in *native/attend.cpp*) ;; *) exec {compiler} "$@" ;; esac
kept={folder}/$(printf '%s\\n' "$@" | sed '$d' | sha256sum | cut -c1-16)
for out; do :; done
{{
    flock 9
    if [ ! -f "$kept" ]; then
        {compiler} "$@" && cp "$out" "$kept.made" && mv "$kept.made" "$kept"
    else
        cp "$kept" "$out"
    fi
}} 9> "$kept.lock"
"""
"""Compiles the kernels of `native` once: processes with the same command but for the file that it
writes, which comes last, wait for the first and copy what it made."""
DIST = Path(__file__).parents[1] / "dist"


def put_built_kernels(folder: Path) -> None:
    """Put the kernels that `nox -s build` compiled from the same files where COMPILER keeps its
    own."""
    try:
        from attnmux.cpu.levels import FOLDER, SOURCE, levels_of  # noqa: PLC0415  # where it is
    except ImportError:
        return
    sources = [SOURCE, *FOLDER.glob("*.h")]
    for file in DIST.glob("attnmux_cpu-*-none-linux_*.whl"):
        with ZipFile(file) as wheel:
            native = ZipPath(wheel, "attnmux/cpu/native/")
            built = {native / level.file_name: level for level in levels_of(platform.machine())}
            if any((native / each.name).read_bytes() != each.read_bytes() for each in sources):
                continue
            for library, level in built.items():
                command = level.command("", library)[1:-1]
                digest = sha256("".join(f"{each}\n" for each in command).encode()).hexdigest()
                mine = folder / f"{digest[:16]}-{os.getpid()}"
                mine.write_bytes(library.read_bytes())
                mine.replace(folder / digest[:16])


def put_compiler(folder: Path) -> None:
    """Write COMPILER to the folder, which all workers of a run share."""
    compiler = shutil.which("c++")
    if compiler is None or not shutil.which("flock"):
        return
    folder.mkdir(exist_ok=True)
    with suppress(FileNotFoundError, BadZipFile):  # a wheel of other files, or a part of one
        put_built_kernels(folder)
    names = {"compiler": shlex.quote(compiler), "folder": shlex.quote(str(folder))}
    mine = folder / f"c++-{os.getpid()}"
    mine.write_text(COMPILER.format(**names))
    mine.chmod(0o755)
    mine.replace(folder / "c++")


@pytest.fixture(scope="session", autouse=True)
def unconfigured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the tests empty folders for caches and settings, and remove our variables.

    The search for a configuration file goes upwards from the working directory. An empty file above
    every test's folder ends it.
    """
    base = tmp_path_factory.getbasetemp()
    (base / "attnmux.toml").touch()
    compiler = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiler"
    put_compiler(compiler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{compiler}{os.pathsep}{os.environ.get('PATH', '')}")
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        for name in list(os.environ):
            if name.startswith("ATTNMUX_"):
                patch.delenv(name)
        for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        yield


@pytest.fixture
def fresh_plugins(tmp_path: Path) -> Iterator[None]:
    """No plugin was loaded before, and the modules of the test's folder are gone afterwards."""
    from attnmux.core.find.manager import manager  # noqa: PLC0415  # tests that install plugins

    manager.cache_clear()
    yield
    manager.cache_clear()
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` and `warm` try no backend first, which takes seconds."""
    for module in ("run", "run_warm"):
        target = f"attnmux.transformers.cli.{module}.first_use"
        monkeypatch.setattr(target, lambda *_, **__: lambda decision: None)


@pytest.fixture
def skip_page_0(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Called with "decode" or "extend": in the steps of that phase, torch_native misses the first
    page of every request that has more than one in the cache."""
    from attnmux.cpu.torch_native import TorchNativeBackend  # noqa: PLC0415  # torch

    prepare = TorchNativeBackend.init_forward_metadata_out_graph

    def plant(phase: str) -> None:
        def skips(self: Any, batch: Any, in_capture: bool = False) -> None:
            decodes = batch.forward_mode.is_decode()
            if decodes != (phase == "decode") or not (decodes or batch.forward_mode.is_extend()):
                return prepare(self, batch, in_capture)
            page = self.context.token_to_kv_pool.page_size
            table = self.context.req_to_token_pool.req_to_token
            cached = batch.seq_lens if decodes else batch.extend_prefix_lens
            several = cached > page
            rows, whole = batch.req_pool_indices[several], table.clone()
            table[rows, :-page] = whole[rows, page:]
            less = page * several.int()
            changed = {"seq_lens": batch.seq_lens - less}
            if not decodes:
                changed["extend_prefix_lens"] = cached - less
            for name in tuple(changed):
                if getattr(batch, f"{name}_cpu") is not None:
                    changed[f"{name}_cpu"] = changed[name].cpu()
            prepare(self, replace(batch, **changed), in_capture)
            table.copy_(whole)
            return None

        monkeypatch.setattr(TorchNativeBackend, "init_forward_metadata_out_graph", skips)

    return plant
