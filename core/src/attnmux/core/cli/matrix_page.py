"""The support matrix as one HTML page, which needs no other file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files

from attnmux.core.cli.matrix_rows import COLUMNS, Row
from attnmux.core.errors import SettingsError

TEMPLATE = "matrix.html"


def page(rows: Sequence[Row], titles: Mapping[str, str]) -> str:
    """The page, with a table for each kind of attention.

    Raises SettingsError without jinja2.
    """
    try:
        import jinja2  # noqa: PLC0415  # an extra
    except ImportError:
        needed = "attnmux matrix --html needs jinja2: pip install 'attnmux-core[html]'"
        raise SettingsError(needed) from None
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.ChainableUndefined)
    template = environment.from_string(files("attnmux.core.cli").joinpath(TEMPLATE).read_text())
    kinds = dict.fromkeys(row.kind for row in rows)
    return template.render(
        columns=COLUMNS,
        statuses=sorted({row.status for row in rows}),
        sections=[
            (titles.get(kind, kind), [row for row in rows if row.kind == kind]) for kind in kinds
        ],
        served=_served,
    )


def _served(row: Row) -> list[str]:
    return [column.title for column, cell in row.features() if cell.served != "no"]
