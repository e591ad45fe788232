"""Files of figures that a plugin carries, by the kind of device that they were measured on."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from attnmux.core.facts.checks import refusal
from attnmux.core.facts.frozen import Plain
from attnmux.core.facts.platform import Platform

NAMED = re.compile(r"([a-z0-9]+)-([A-Za-z0-9_]+)-([a-z0-9_]+)\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures(Plain):
    """A file in a plugin's wheel that `attnmux bench --ship` wrote. It is read when a choice for
    such a device is made. Its name is `VENDOR-ARCH-PRODUCT.json`."""

    vendor: str
    arch: str
    product: str
    """The product's name in lower case without the vendor's, "h200" of "NVIDIA H200"."""
    file: str

    @classmethod
    def of(cls, file: Path) -> Figures:
        """Raises InvalidInput for a name that does not say the device."""
        if not (parts := NAMED.fullmatch(file.name)):
            expected = "VENDOR-ARCH-PRODUCT.json"
            raise refusal("file of figures, name", file.name, expected)
        vendor, arch, product = parts.groups()
        return cls(vendor=vendor, arch=arch, product=product, file=str(file))

    @classmethod
    def in_folder(cls, folder: Path) -> list[Figures]:
        """A plugin's answer to `attnmux_figures`: the folder's files, in the order of their names;
        none if there is no folder. Raises InvalidInput as `of`."""
        try:
            names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
        except FileNotFoundError:
            return []
        return [cls.of(folder / name) for name in names]

    @classmethod
    def name_for(cls, platform: Platform) -> str:
        """The name of a file of figures of the platform. Raises InvalidInput for one without a
        product's name."""
        if not (product := product_of(platform.name, platform.vendor)):
            raise refusal("platform, name", platform.name, "the product's name")
        return f"{platform.vendor}-{platform.arch}-{product}.json"

    def hold_on(self, platform: Platform) -> bool:
        """Whether the device is of this kind. One without a name, as `--platform nvidia:sm90`
        describes, is if the architecture is."""
        if (self.vendor, self.arch) != (platform.vendor, platform.arch):
            return False
        return not platform.name or self.product == product_of(platform.name, platform.vendor)


def product_of(name: str, vendor: str) -> str:
    """`Figures.product` of a device: the words of a device's name, joined by underscores."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return "_".join(words[1:] if words[:1] == [vendor] else words)
