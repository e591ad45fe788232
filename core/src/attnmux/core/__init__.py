"""The public names of attnmux. Importing this module imports none of their modules, and no torch.

`__init__.pyi` lists the names, a line each. A name's module is imported on first use.
"""

from __future__ import annotations

from functools import cache


@cache
def _modules() -> dict[str, str]:
    """The module of each public name."""
    import re  # noqa: PLC0415  # the command needs no public name
    from pathlib import Path  # noqa: PLC0415  # as above

    listed = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    lines = re.findall(r"^from (\S+) import (\w+) as", listed, re.MULTILINE)
    return {name: module for module, name in lines}


def __getattr__(name: str) -> object:
    if name == "__all__":
        value: object = sorted(_modules())
    elif name.startswith("_") or name not in _modules():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        import importlib  # noqa: PLC0415  # as above

        try:
            value = getattr(importlib.import_module(_modules()[name]), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            message = f"attnmux.core.{name} needs torch: pip install 'attnmux-core[torch]'"
            raise ModuleNotFoundError(message, name="torch") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_modules()})
