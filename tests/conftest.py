"""Tests ignore the configuration, variables and measurements of this machine's user.

With `--full` they also run what differs from a case that always runs by a number or a page size.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import re
import shlex
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile
from zipfile import Path as ZipPath
from zlib import crc32

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


EVERY_PAGE_SIZE = frozenset(
    {
        "decode-changing-batch-size",
        "decode-max-length",
        "decode-nan",
        "decode-page-boundaries",
        "decode-uneven",
        "decode-window",
        "decode-window-of-a-page",
        "decode-window-pool",
        "extend-cross",
        "extend-full-prefix-hit",
        "extend-max-length",
        "extend-nan",
        "extend-page-boundaries",
        "extend-partly-filled-page",
        "extend-prefix",
        "extend-shared-prefix",
        "extend-window",
        "extend-window-of-a-page",
        "extend-window-pool",
        "mixed",
        "mla-decode",
        "mla-extend",
        "nsa-decode-page-boundaries",
        "nsa-extend",
        "strided-decode",
        "verify-chain",
        "verify-tree",
    }
)
"""Cases of a suite that run at each of its page sizes. Of every other case, and in graphs, one is
enough."""
NOT_OF_GRAPHS = re.compile(
    r"-heads|-dims?-|-float(16|32)|-fp8_e5m2|-scale$|-saturated|-cap|-one-request|kv-scales|"
    r"(e4m3|mla)-kv-in-pool|e4m3-(window|scales-lse)|-(window|pool)-(sinks|fp8_e4m3)|"
    r"-long-(?!windows$)|strided-(?!decode$)|"
    r"(padding|size|mla-decode|then-decode|verify-empty-prefix)-host-lens"
)
"""Cases that differ from others by a number, a dtype or a flag of the kernel, which graphs do not
change, or join two that run in graphs."""
JOINED = re.compile(
    r"fp8_e5m2-(?!scales$)|(verify|(mla|nsa)-\w+)-fp8_e5m2|empty-prefix-.+-host-lens|"
    r"mixed-(window|chunk|sinks|kv-in-pool|deterministic|fp8|dims).*-host-lens|"
    r"(alibi|relative)-extend-long|mla-unsaved-long|mixed-long-chunk|long-chunk-empty-prefix|"
    r"alibi-(decode|extend)-(\d|dim|float|scale|fp8|deterministic|sinks|chunk)|"
    r"relative-(decode|extend)-(\d|float|fp8|deterministic|sinks|chunk|strided|reach-128)|"
    r"relative-encoder-(float|reach-128)|mla-\w+-\d+-requests"
)
"""Cases that join features, each of which has a case of its own. Of 8-bit floats, e4m3 has these
cases too."""
SHARE_OF_ENGINES = 14
"""Each suite runs one in so many cases of what engines do, all suites together all of them: what
they reveal is in core as often as in a backend."""
PAGED = re.compile(r"(.*::test_agrees_with_reference\[[^-]*-(.*))-page(\d+)(.*)")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run every case at every page size, and in graphs"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: near to a case that always runs; needs --full")
    config.addinivalue_line("markers", "share(n): run one case in n without --full")
    config.addinivalue_line("markers", "one_of(parameter): run at one of its values without --full")
    config.addinivalue_line(
        "markers", "transformers(release): needs that release of transformers, or a later one"
    )
    config.addinivalue_line("markers", "near(n): run one case in n of a suite, and those of pages")
    with suppress(ImportError):  # engines' own environments have none
        from hypothesis import settings  # noqa: PLC0415  # as above

        settings.register_profile("full", max_examples=150, deadline=None)
        settings.register_profile("short", max_examples=30, deadline=None)
        settings.load_profile("full" if config.getoption("full") else "short")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `--full`, run each case of a suite at one page size, which its name decides, cases
    that differ by a number without graphs alone, no joined ones, and a share of those of engines. A
    suite that is `near` another runs a share of its cases: the same adapter runs all of them
    elsewhere."""
    skip_for_transformers(items)
    if config.getoption("full"):
        return
    values: defaultdict[str, set[int | str]] = defaultdict(set)
    others: list[tuple[pytest.Item, str, int | str]] = []
    left_out = {item for item in items if item.get_closest_marker("full")}
    for item in items:
        if (mark := item.get_closest_marker("share")) and crc32(item.name.encode()) % mark.args[0]:
            left_out.add(item)
        if mark := item.get_closest_marker("one_of"):
            value = item.callspec.params[mark.args[0]]
            value = getattr(value, "__name__", value)
            start, _, ids = item.nodeid.rstrip("]").partition("[")
            kept = ids.split("-")
            kept.remove(str(value))
            name = "-".join([start, *kept])
            values[name].add(value)
            others.append((item, name, value))
        found = PAGED.fullmatch(item.nodeid)
        in_graph = found and found[4] == "-graph]"
        if found and found[2] not in EVERY_PAGE_SIZE and (mark := item.get_closest_marker("near")):
            left_out.update([item] if crc32(found[2].encode()) % mark.args[0] else [])
        if found and runs_in_full_alone(found):
            left_out.add(item)
        elif found and (in_graph or found[2] not in EVERY_PAGE_SIZE):
            values[found[1] + found[4]].add(int(found[3]))
            others.append((item, found[1] + found[4], int(found[3])))
    left_out |= {item for item, name, value in others if value != one_value(name, values[name])}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


@cache
def of_engines() -> frozenset[str]:
    """Cases of what engines do, without their page size."""
    # Imports torch, which reads what is set above; environments of engines have no suite
    from attnmux.testing.engine_cases import engine_cases  # noqa: PLC0415
    from attnmux.testing.steady_cases import steady_cases  # noqa: PLC0415

    cases = (*engine_cases(1), *steady_cases(1))
    return frozenset(case.name.removesuffix("-page1") for case in cases)


def runs_in_full_alone(found: re.Match[str]) -> bool:
    """Whether a case, as `PAGED` reads it, runs with `--full` alone."""
    name, in_graph = found[2], found[4] == "-graph]"
    if name in of_engines() and crc32((found[1] + found[4]).encode()) % SHARE_OF_ENGINES:
        return True
    return bool(JOINED.search(name) or (in_graph and NOT_OF_GRAPHS.search(name)))


def skip_for_transformers(items: list[pytest.Item]) -> None:
    """Skip tests of models that the installed transformers does not serve yet."""
    for item in items:
        if mark := item.get_closest_marker("transformers"):
            needed, there = mark.args[0], version("transformers")
            if Version(there) < Version(needed):
                why = f"needs transformers {needed}, got {there}"
                item.add_marker(pytest.mark.skip(reason=why))


def one_value(name: str, values: Collection[int | str]) -> int | str:
    """The same one in every process, and all of them over many names."""
    return sorted(values)[crc32(name.encode()) % len(values)]


@pytest.fixture(scope="session")
def full(pytestconfig: pytest.Config) -> bool:
    """Whether random runs take their whole length."""
    return bool(pytestconfig.getoption("full"))


@pytest.fixture(scope="session")
def every_page_size() -> Collection[str]:
    return EVERY_PAGE_SIZE


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
