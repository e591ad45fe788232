"""Give a copy of the example a vendor's names: `python rename.py VENDOR NAME AUTHOR`, in the copy.

Copier runs it (`copier.yml`). The distribution becomes attnmux-VENDOR and its package
attnmux_VENDOR.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

TEXTS = (".py", ".toml", ".md", ".typed")
LINK = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")
"""A link to a page of the repository, which the copy has left."""


def rename(folder: Path, vendor: str, name: str, author: str) -> None:
    """Change texts and names of files below the folder."""
    words = {
        "acme-attnmux": f"attnmux-{vendor}",
        "acme_attnmux": f"attnmux_{vendor}",
        "the attnmux authors": author,
        "Attention of a made-up accelerator for attnmux: an example of a vendor's plugin": (
            f"Attention on {name} devices for attnmux"
        ),
        "ACME": vendor.upper(),
        "Acme": name,
        "acme": vendor,
    }
    for file in sorted(path for path in folder.rglob("*") if path.suffix in TEXTS):
        text = LINK.sub(r"\1", file.read_text())
        for old, new in words.items():
            text = text.replace(old, new)
        file.write_text(text)
    package = folder / "src/acme_attnmux"
    package.rename(package.with_name(f"attnmux_{vendor}"))


if __name__ == "__main__":
    rename(Path.cwd(), *sys.argv[1:])
