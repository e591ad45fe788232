"""The options of `attnmux select` as data. click declares them, and `read` needs no click."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from attnmux.core.choosing.machine.platform import GRAMMAR
from attnmux.core.cli.invocation import JSON


class Option(NamedTuple):
    """An option with a value, unless it is a flag."""

    said: str
    help: str
    name: str = ""
    """Of the argument, where it is not that of the option."""
    is_flag: bool = False
    multiple: bool = False
    default: Any = None
    least: int | None = None
    """The value is a number from this one on."""
    words: tuple[str, ...] = ()
    """The value is one of these."""
    metavar: str | None = None

    @property
    def argument(self) -> str:
        return self.name or self.said[2:].replace("-", "_")


MODES = ("prefill", "decode")
PLATFORM = f"A machine, present or not, as {GRAMMAR}; or a vendor here. Several are compared."
SET = "An option of a backend; `attnmux backends --json` lists them."
OPTIONS = (
    Option("--platform", PLATFORM, "platforms", multiple=True),
    Option("--request", "FIELD=VALUE,…: page_size=16,spec_topk=4", "fields", default=""),
    Option("--model", "A folder with a Hugging Face config.json."),
    Option("--tp", "Ranks that share the heads.", default=1, least=1),
    Option("--backend", "The backend for extend and decode."),
    Option("--prefill-backend", "The backend for extend."),
    Option("--decode-backend", "The backend for decode."),
    Option("--mm-backend", "The backend for a multimodal encoder."),
    Option("--linear-backend", "The backend for layers without softmax attention."),
    Option("--speculative-attention-mode", "Which of the two verifies and drafts.", words=MODES),
    Option("--set", SET, "assignments", multiple=True, metavar="BACKEND.OPTION=VALUE"),
    Option("--without", "Count a library as not installed.", multiple=True, metavar="DIST"),
    Option("--allow-coercion", "Allow changes to values that you set.", is_flag=True),
    Option("--no-measurements", "Ignore the measurements of this machine.", is_flag=True),
    Option("--engine", "Also print the line that starts it: vllm, sglang.", metavar="NAME"),
    Option("--explain", "Say why each other lost, and who set each value.", is_flag=True),
    Option("--all", "Like --explain, with every reason.", "every", is_flag=True),
)
SLOW = ("--explain", "--all", "--engine")
"""Their answers import more than click."""


def read(args: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of `select` for a plain answer in JSON; None for all that click must read."""
    known = {
        option.said: option
        for option in OPTIONS
        if option.least is None and not option.words and option.said not in SLOW
    }
    found: dict[str, Any] = {
        option.argument: () if option.multiple else False if option.is_flag else option.default
        for option in OPTIONS
    }
    as_json = False
    rest = iter(args)
    for arg in rest:
        said, equals, value = arg.partition("=")
        option = known.get(said)
        if arg == JSON:
            as_json = True
        elif option is None or (option.is_flag and equals):
            return None
        elif option.is_flag:
            found[option.argument] = True
        else:
            value = value if equals else next(rest, "-")
            if value.startswith("-"):
                return None
            old = found[option.argument]
            found[option.argument] = (*old, value) if option.multiple else value
    return {**found, "as_json": True} if as_json else None
