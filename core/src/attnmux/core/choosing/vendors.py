"""The one table that knows vendors: their names, how their devices are found, who serves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from attnmux.core.choosing.machine.vendors import Evidence, any_path, compute_node, render_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Vendor:
    """A row of the table."""

    name: str
    device_type: str
    """torch's word for its devices."""
    runtime: str
    """The runtime's name, and its key in `Platform.parse`; empty for the CPU."""
    arch: str
    """A pattern that an architecture's name matches; group 1 holds what encodes the version."""
    examples: str
    """Architectures, for who wrote another."""
    version: Callable[[str], tuple[int, ...]]
    """From group 1 of `arch` to numbers that compare."""
    distribution: str
    evidence: Evidence
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of architectures."""


def _capability(digits: str) -> tuple[int, ...]:
    """sm90 is (9, 0), sm121 is (12, 1)."""
    return int(digits[:-1]), int(digits[-1])


def _gfx(digits: str) -> tuple[int, ...]:
    """gfx942 is (9, 4, 2), gfx90a is (9, 0, 10), gfx1100 is (11, 0, 0)."""
    return int(digits[:-2]), int(digits[-2], 16), int(digits[-1], 16)


def _generation(digits: str) -> tuple[int, ...]:
    """xe2 is (2,); a name without a number is ()."""
    return (int(digits),) if digits else ()


VENDORS: Mapping[str, Vendor] = {
    row.name: row
    for row in (
        Vendor(
            name="nvidia",
            device_type="cuda",
            runtime="cuda",
            arch=r"sm(\d{2,3})[af]?",
            examples="sm80, sm90 or sm100",
            version=_capability,
            distribution="attnmux-nvidia",
            # The second is what Windows' driver puts into its Linux guests, which have no nodes
            evidence=any_path("/dev/nvidia[0-9]*", "/usr/lib/wsl/lib/libnvidia-ml.so.1"),
        ),
        Vendor(
            name="amd",
            device_type="cuda",
            runtime="rocm",
            arch=r"gfx((?:[6-9]|1\d)[0-9a-f]{2})",
            examples="gfx90a, gfx942 or gfx1100",
            version=_gfx,
            distribution="attnmux-amd",
            evidence=compute_node(0x1002),
        ),
        Vendor(
            name="intel",
            device_type="xpu",
            runtime="oneapi",
            arch=r"xe(\d*)(?:_?(?:lp|lpg|lpgplus|hp|hpg|hpc))?",
            examples="xe2, xe_hpg or xe_hpc",
            version=_generation,
            distribution="attnmux-intel",
            evidence=render_node("0x8086"),
        ),
        Vendor(
            name="ascend",
            device_type="npu",
            runtime="cann",
            arch=r"()(?:310p|910[a-z]?|910_\d+|950)",
            examples="910b, 910_93 or 310p",
            version=_generation,
            distribution="attnmux-ascend",
            evidence=any_path("/dev/davinci[0-9]*"),
        ),
        Vendor(
            name="cpu",
            device_type="cpu",
            runtime="",
            arch=r"()(?:x86_64|aarch64|ppc64le|s390x|riscv64)",
            examples="x86_64 or aarch64",
            version=_generation,
            distribution="attnmux-cpu",
            evidence=any_path(),
            aliases={"amd64": "x86_64", "arm64": "aarch64"},
        ),
    )
}

EXAMPLE = "nvidia:sm90,cuda=12.4"
"""A platform in words."""
