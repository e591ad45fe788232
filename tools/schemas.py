"""Make the JSON schemas of a card and of a decision from the classes that they are.

    python -m tools.schemas [--check]

They lie in docs/schemas/, and a release carries them. `attnmux backends --json` prints cards, and
`Decision.to_json` and `attnmux select --json` decisions. With --check nothing is written, and the
exit code is 1 if a file is not what the code says.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from attnmux.core import Decision, Platform, Request
from attnmux.core.facts.fields import parted, types_of
from attnmux.core.plugin import BackendCard, Clause, Condition, Option, Verified

FOLDER = Path(__file__).parents[1] / "docs/schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
TEXT = {"type": "string"}
ALONE: Mapping[Any, dict[str, Any]] = {
    str: TEXT,
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    NoneType: {"type": "null"},
    Clause: {"type": "object", "additionalProperties": TEXT},
}
ADDED: Mapping[type, Mapping[str, Any]] = {
    Decision: {"hash": TEXT},
    Verified: {"emulated": {"type": "boolean"}},
}
LEFT_OUT: Mapping[type, Sequence[str]] = {Decision: ["is_checked"], Platform: ["is_here"]}
"""What `to_dict` adds and leaves out."""
COUNTS = {"type": "object", "additionalProperties": {"type": "integer"}}
OVERRULED: Mapping[tuple[type, str], Any] = {
    (Request, "compressed_layers"): COUNTS,
    (Request, "linear_layers"): COUNTS,
    (Request, "parts"): {"type": "object"},
    (Option, "type"): {"enum": ["bool", "int", "float", "str"]},
    (BackendCard, "requires"): {"type": "array", "items": {"type": "array", "items": TEXT}},
}


def schema_of(kind: type, title: str) -> dict[str, Any]:
    """The schema of a class's `to_dict`, with the classes in it as definitions."""
    definitions: dict[str, Any] = {}
    top = _schema(kind, definitions)
    return {"$schema": DIALECT, "title": title, **top, "$defs": dict(sorted(definitions.items()))}


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401  # any type
    kind = parted(hint)[0]
    origin, args = get_origin(kind), get_args(kind)
    if kind in ALONE:
        return ALONE[kind]
    if origin in (Union, UnionType):
        return {"anyOf": [_schema(each, definitions) for each in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if isinstance(kind, type) and issubclass(kind, Condition):
        return TEXT
    if is_dataclass(kind):
        return _reference(kind, definitions)
    if origin is not None and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(args[1], definitions)}
    if origin is tuple and args[-1] is not Ellipsis:
        places = [_schema(each, definitions) for each in args]
        return {"type": "array", "prefixItems": places, "minItems": len(args), "items": False}
    if origin is not None and issubclass(origin, (Sequence, frozenset)):
        return {"type": "array", "items": _schema(args[0], definitions)}
    return {}


def _reference(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401  # a dataclass
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # a decision has decisions
        types = types_of(kind)
        names = [each.name for each in fields(kind) if each.name not in LEFT_OUT.get(kind, ())]
        properties = {
            name: OVERRULED.get((kind, name)) or _schema(types[name], definitions) for name in names
        }
        definitions[kind.__name__] = {
            "type": "object",
            "properties": {**properties, **ADDED.get(kind, {})},
            "required": [
                each.name
                for each in fields(kind)
                if each.name in names and each.default is each.default_factory is MISSING
            ],
        }
    return {"$ref": f"#/$defs/{kind.__name__}"}


def schemas() -> dict[str, str]:
    """The text of each file, by name."""
    made = {
        "card.schema.json": schema_of(BackendCard, "A backend's card"),
        "decision.schema.json": schema_of(Decision, "A decision"),
    }
    return {name: json.dumps(each, indent=2) + "\n" for name, each in made.items()}


def main() -> int:
    stale = [
        name
        for name, text in schemas().items()
        if not (FOLDER / name).exists() or (FOLDER / name).read_text() != text
    ]
    if "--check" in sys.argv:
        print("\n".join(f"{name}: python -m tools.schemas writes it anew" for name in stale))
        return 1 if stale else 0
    for name in stale:
        (FOLDER / name).write_text(schemas()[name])
        print(FOLDER / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
