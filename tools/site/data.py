"""Reference pages from the tables that the code reads."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path

import click

from attnmux.core.cards.clause import Clause
from attnmux.core.cli.explain import meanings
from attnmux.core.cli.verbs import verbs
from attnmux.core.facts.axes import AXES
from attnmux.core.facts.axis import Axis
from attnmux.core.find import settings
from attnmux.core.find.plugins import Plugins
from attnmux.core.find.settings_file import CONFIG
from attnmux.testing.matrix.command import markdown
from attnmux.testing.matrix.rows import rows_of
from tools.site.files import ROOT

OURS = tuple(sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")))
"""The plugins of this repository, by their names."""
DAY = re.compile(r"\b20\d\d-\d\d-\d\d\b")
MACHINE = re.compile(r"^\| machine \| ([^|,;(]+)", re.MULTILINE)
REQUIRED = frozenset(
    field.name
    for field in fields(Clause)
    if (field.default, field.default_factory) == (MISSING,) * 2
)
"""The axes that each clause states."""


def support_matrix() -> str:
    """The matrix of this repository's plugins. Raises SystemExit if one of them is not loaded."""
    plugins = Plugins.load(OURS, ())
    missing = set(OURS).difference(plugin.name for plugin in plugins.loaded)
    if missing:
        names = ", ".join(sorted(missing))
        raise SystemExit(f"plugins: expected {', '.join(OURS)}, got none of {names}: install them")
    return markdown(rows_of(plugins.offers()))


def axes() -> str:
    """A line for each axis of choosing, in the order of its table."""
    rows = [(f"`{axis.name}`", _values(axis), _asked(axis), axis.meaning) for axis in AXES]
    return _page(
        "Axes of choosing",
        "An axis is a field of a card's clause. `solve` compares it with the request or the "
        "platform, and a value that fails gives a reason with the axis' name as its code. A "
        "*feature* is refused unless a clause declares it; any other axis that a clause leaves out "
        "is no limit. Conditions are those of `attnmux.core.plugin`: `one_of`, `between`, "
        "`at_most`, `multiple_of`, `versions`, `runtimes`, `includes`, `emulated`, `ANY` and "
        "`NONE`.",
        _table(("axis", "values", "", "a backend that fails it"), rows),
    )


def _values(axis: Axis) -> str:
    if axis.words:
        return ", ".join(f"`{word}`" for word in axis.words)
    return {"numbers": "a number", "flag": "yes or no", "words": "a word", "own": "its own"}[
        axis.values
    ]


def _asked(axis: Axis) -> str:
    words = {
        "a clause must state it": axis.name in REQUIRED,
        "feature": axis.is_feature,
        "decided with the backend": axis.decided,
        "`--allow-coercion` may drop it": axis.droppable,
    }
    return ", ".join(word for word, holds in words.items() if holds)


def reason_codes() -> str:
    """Every code of a reason, as `attnmux explain` prints it."""
    rows = [(f"`{code}`", meaning) for code, meaning in meanings().items()]
    return _page(
        "Reason codes",
        "Each reason in `attnmux select --explain` and `--json` has one of these codes. "
        "`attnmux explain CODE` prints the same line.",
        _table(("code", "what it means, and what helps"), rows),
    )


def verb_pages() -> str:
    """The help of every verb, as `--help` prints it."""
    context = click.Context(verbs, info_name="attnmux")
    parts = [
        "Every verb takes `--json`, `--debug` and `--help`. Defaults are "
        "[settings](settings.md) and arguments override them."
    ]
    for name in verbs.list_commands(context):
        command = verbs.get_command(context, name)
        if command is None:
            raise SystemExit(f"verbs: expected {name}, got none")
        inner = click.Context(command, info_name=name, parent=context)
        parts.append(f"## {name}\n\n```text\n{command.get_help(inner).rstrip()}\n```")
    return _page("Verbs", *parts)


def setting_names() -> str:
    """Every setting with its variable and its meaning."""
    rows = [
        (f"`{name}`", f"`{settings.PREFIX}{name.upper()}`", meaning)
        for name, meaning in _fields(inspect.getsource(settings.Settings))
        if name != "sources"
    ]
    return _page(
        "Settings",
        "A setting comes from its variable, else from `attnmux.toml` or `[tool.attnmux]` of a "
        "`pyproject.toml`, the first of these from the working directory upwards. An argument "
        f"overrides both. `{CONFIG}=FILE` names the file. A file that another user could have "
        "written is refused. In a variable, several names are separated by commas.",
        '```toml\n# attnmux.toml\nprefer_backends = ["flashinfer"]\ndecode_backend = "fa3"\n'
        "[options.fa3]\nnum_splits = 4\n```",
        _table(("setting", "variable", "meaning"), rows),
    )


def _fields(source: str) -> Iterator[tuple[str, str]]:
    """(name, docstring) of each field of a dataclass. Raises SystemExit for one without."""
    (cls,) = ast.parse(source).body
    assert isinstance(cls, ast.ClassDef)
    for place, field in enumerate(cls.body):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        after = cls.body[place + 1]
        text = after.value if isinstance(after, ast.Expr) else None
        if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
            raise SystemExit(f"{cls.name}.{field.target.id}: expected a docstring, got none")
        yield field.target.id, " ".join(text.value.split())


def results() -> str:
    """A line for each file of benchmarks/results/, the newest first."""
    rows = sorted(
        (_result(path) for path in ROOT.glob("benchmarks/results/*.md")), key=lambda row: row[1]
    )
    return _page(
        "Results by date",
        "Each page has its machine, versions and command. The date is the last one that it names. "
        "[Benchmarks](results/index.md) says what each compares.",
        _table(("result", "last date", "machine"), rows[::-1]),
    )


def _result(path: Path) -> tuple[str, str, str]:
    """Its title, its last date, and the machine of its first table up to the first comma."""
    text = path.read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    machine = MACHINE.search(text)
    days = DAY.findall(text)
    if not days:
        raise SystemExit(f"{path.name}: expected the date of a run, got none")
    return f"[{title}](results/{path.name})", max(days), machine[1].strip() if machine else ""


def _page(title: str, *parts: str) -> str:
    return "\n\n".join((f"# {title}", *parts)) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
