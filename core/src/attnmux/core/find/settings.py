"""The only reader of the environment, and of the configuration file through `settings_file.py`.

A setting comes from the variable ATTNMUX_NAME, else from `attnmux.toml` or `[tool.attnmux]` in
`pyproject.toml`, the first of these from the working directory upwards, else it is unset.
ATTNMUX_CONFIG names the file instead. A file that another user could have written is refused where
it was found, since it decides which code runs; a file that is named is trusted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args

from attnmux.core.facts.checks import nearest, read_flag
from attnmux.core.facts.errors import InvalidInput, SettingsError
from attnmux.core.facts.fields import read_fields, readers_of
from attnmux.core.facts.frozen import FrozenMapping
from attnmux.core.facts.policy import NAMING, Policy
from attnmux.core.facts.request import ORIGINS
from attnmux.core.facts.values import OptionValue
from attnmux.core.facts.vendors import VENDORS
from attnmux.core.find.settings_file import CONFIG, find_settings

PREFIX = "ATTNMUX_"
SECONDS, LONGEST = 10.0, 3600
"""For one plugin. A healthy one answers in milliseconds, a wedged driver never."""


def _word(where: str, value: Any) -> str:  # noqa: ANN401  # reads any value
    if isinstance(value, str) and value.strip():
        return value.strip()
    raise InvalidInput(where, got=repr(value), expected="a name")


def _words(where: str, value: Any) -> tuple[str, ...]:  # noqa: ANN401  # reads any value
    """A list, or names separated by commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise InvalidInput(where, got=repr(value), expected="a list of names")
    return tuple(_word(where, item) for item in items)


def read_assignments(where: str, texts: Iterable[str]) -> dict[str, dict[str, str]]:
    """["triton.splits=8"] → {"triton": {"splits": "8"}}. The backend may be `plugin/name`.

    Raises InvalidInput for other text.
    """
    by_backend: dict[str, dict[str, str]] = {}
    for text in texts:
        target, equals, value = text.partition("=")
        backend, dot, option = target.strip().partition(".")
        if not (equals and dot and backend and option):
            raise InvalidInput(where, got=repr(text), expected="BACKEND.OPTION=VALUE")
        by_backend.setdefault(backend, {})[option] = value
    return by_backend


def _options(where: str, value: Any) -> Mapping[str, Mapping[str, Any]]:  # noqa: ANN401  # reads any value
    value = read_assignments(where, value.split(",")) if isinstance(value, str) else value
    usable = isinstance(value, Mapping) and all(
        isinstance(table, Mapping)
        and all(isinstance(item, get_args(OptionValue)) for item in table.values())
        for table in value.values()
    )
    if not usable:
        expected = (
            "a table for each backend, as [options.NAME] in the configuration file with KEY = VALUE"
        )
        raise InvalidInput(where, got=repr(value), expected=expected)
    return FrozenMapping({name: FrozenMapping(table) for name, table in value.items()})


def _seconds(where: str, value: Any) -> float:  # noqa: ANN401  # reads any value
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds <= LONGEST or isinstance(value, bool):
        expected = f"a number of seconds, more than 0 and at most {LONGEST}"
        raise InvalidInput(where, got=repr(value), expected=expected)
    return seconds


def _steps(where: str, value: Any) -> int:  # noqa: ANN401  # reads any value
    text = str(value)
    if isinstance(value, bool) or not text.isdecimal():
        raise InvalidInput(where, got=repr(value), expected="a number of steps; 0: no canary")
    return int(text)


Word = Annotated[str | None, _word]
Words = Annotated[tuple[str, ...], _words]
Flag = Annotated[bool, read_flag]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The configured values; None or empty if nothing is configured."""

    platform: Word = None
    """A vendor, or vendor:arch, that is on this machine. A device that no plugin finds is described
    as `Platform.parse` reads it, "nvidia:sm87,cuda=12.6"."""
    backend: Word = None
    """The backend of every phase that has no setting of its own."""
    prefill_backend: Word = None
    """The backend of extend."""
    decode_backend: Word = None
    """The backend of decode."""
    mm_backend: Word = None
    """The backend of a multimodal model's encoder."""
    linear_backend: Word = None
    """The backend of layers without softmax attention."""
    allow_backends: Annotated[tuple[str, ...] | None, _words] = None
    """The only backends that may be chosen."""
    deny_backends: Words = ()
    """Backends that may not be chosen."""
    prefer_backends: Words = ()
    """Backends that are chosen before others, the first one first, if they serve the request."""
    allow_plugins: Annotated[tuple[str, ...] | None, _words] = None
    """Distributions; plugins of others are not imported. NAME also means attnmux-NAME."""
    deny_plugins: Words = ()
    """Distributions or plugins."""
    plugin_seconds: Annotated[float, _seconds] = SECONDS
    """How long a plugin's probe may take to find devices."""
    no_plugins: Flag = False
    """Import no plugin."""
    allow_coercion: Flag = False
    """Let the solver change or drop values that no backend serves; the decision records them."""
    deterministic: Flag = False
    """Request bits that do not depend on the other requests, in `select` and `generate`."""
    measurements: Word = None
    """The file of this machine's measurements, instead of the one in the user's cache folder. A
    path in a configuration file is relative to that file."""
    no_measurements: Flag = False
    """Choose as if nothing had been measured on this machine."""
    no_shipped_figures: Flag = False
    """Choose as if plugins carried no figures: by this machine's, else by the priors of cards."""
    ignore_advisories: Words = ()
    """Ids of findings about kernel libraries that refuse nothing; a decision that rests on one says
    so."""
    launches: Word = None
    """The file of launches that were tuned on this machine, as `measurements` is."""
    no_launches: Flag = False
    """Launch as if nothing had been tuned."""
    canary: Annotated[int, _steps] = 0
    """Inside vLLM and SGLang, compare one step in so many with float64; 0: none."""
    canary_failures: Word = None
    """The folder that keeps the steps that differ, for `attnmux replay`. A path in a configuration
    file is relative to that file."""
    canary_values: Flag = False
    """Keep the values of such a step too, which reveal the users' text."""
    debug: Flag = False
    """Show the traceback of an error. `generate` also checks the values of each batch."""
    options: Annotated[Mapping[str, Mapping[str, Any]], _options] = field(
        default_factory=FrozenMapping
    )
    """By backend. As a variable: BACKEND.OPTION=VALUE,…"""
    sources: Mapping[str, str] = field(default_factory=FrozenMapping)
    """Where each value that is set comes from: a variable or a file."""

    def __post_init__(self) -> None:
        read_fields(self, "settings")

    @classmethod
    def load(
        cls, *, environ: Mapping[str, str] | None = None, directory: Path | None = None
    ) -> Settings:
        """Read `environ` (default: the process's) and the file nearest to `directory`.

        Raises SettingsError, naming the variable or the file, for a name that is no setting or a
        value that cannot be used.
        """
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        variables = os.environ if environ is None else environ
        path, table = find_settings(directory, variables.get(CONFIG, ""))
        for name, value in table.items():
            values[name] = _read(name, value, f"{path}: {name}")
            sources[name] = str(path)
        for variable, text in variables.items():
            if variable.startswith(PREFIX) and text and variable != CONFIG:
                name = variable.removeprefix(PREFIX).lower()
                values[name] = _read(name, text, variable)
                sources[name] = variable
        return cls(**values, sources=sources)

    def plugin_filter(self) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
        """(allow, deny): names of distributions."""
        return (() if self.no_plugins else self.allow_plugins), self.deny_plugins

    def measurements_file(self) -> Path | None:
        """Where measurements of this machine are kept; None if they are switched off, or if
        no file is named and there is no home directory. Raises SettingsError for a path below an
        unknown home directory."""
        return None if self.no_measurements else self._kept("measurements", self.measurements)

    def launches_file(self) -> Path | None:
        """Where launches that were tuned on this machine are kept, as `measurements_file`."""
        return None if self.no_launches else self._kept("launches", self.launches)

    def canary_folder(self) -> Path | None:
        """Where steps that differ are kept. Raises SettingsError as `measurements_file` does."""
        given = self.canary_failures
        return None if given is None else self._named("canary_failures", given)

    def where(self, name: str) -> str:
        """For errors: the variable or the option that a setting comes from, or its file and name;
        the name alone if it is not set."""
        source = self.sources.get(name, name)
        return f"{source}: {name}" if self._is_in_file(name) else source

    def _named(self, name: str, given: str) -> Path:
        """A path in a configuration file is relative to that file."""
        try:
            path = Path(given).expanduser()
        except RuntimeError as error:
            raise SettingsError(
                f"{self.where(name)}: expected a file, got {given!r}, "
                "whose home directory is not known; write the whole path"
            ) from error
        return Path(self.sources[name]).parent / path if self._is_in_file(name) else path

    def _is_in_file(self, name: str) -> bool:
        return not self.sources.get(name, PREFIX).startswith((PREFIX, "--"))

    def _kept(self, name: str, given: str | None) -> Path | None:
        if given is not None:
            return self._named(name, given)
        folder = self.cache_folder()
        return None if folder is None else folder / f"{name}.json"

    @staticmethod
    def cache_folder() -> Path | None:
        """The user's folder for what can be computed again; None if there is no home directory,
        as in a container."""
        import platformdirs  # noqa: PLC0415  # few verbs ask

        try:
            return platformdirs.user_cache_path("attnmux", appauthor=False)
        except RuntimeError:
            return None

    @staticmethod
    def device_variables() -> Mapping[str, str]:
        """The environment variables that are set and hide devices from this process
        (`Vendor.variables`), for the probes, which must not read the environment themselves."""
        names = {name for row in VENDORS.values() for name in row.variables}
        return {name: os.environ[name] for name in sorted(names & os.environ.keys())}

    def policy(self, **given: Any) -> Policy:  # noqa: ANN401  # the fields of Policy
        """A policy of the fields that the user gave (None: not given), else of those configured.

        `backend` overrides the phases' backends of weaker sources: the user's `--backend` overrides
        the environment and the file, and the environment overrides the file.
        """
        user_values = {name: value for name, value in given.items() if value is not None}
        chosen = {name: user_values.get(name, getattr(self, name)) for name in NAMING}
        origins = {
            n: self._origin(n, user_values) for n, value in chosen.items() if value is not None
        }
        base = origins.get("backend", ORIGINS[-1])
        for name in origins.keys() & {"prefill_backend", "decode_backend"}:
            if ORIGINS.index(base) < ORIGINS.index(origins[name]):
                chosen[name] = None
                del origins[name]
        options: dict[str, Mapping[str, Any]] = dict(self.options)
        for backend, values in user_values.pop("options", {}).items():
            options[backend] = {**options.get(backend, {}), **values}
        configured = {
            "allow": self.allow_backends,
            "deny": self.deny_backends,
            "prefer": self.prefer_backends,
            "allow_coercion": self.allow_coercion,
        }
        return Policy(
            **{**configured, **user_values, **chosen},
            options=FrozenMapping({name: FrozenMapping(v) for name, v in options.items()}),
            origins=FrozenMapping(origins),
        )

    def _origin(self, name: str, given: Mapping[str, Any]) -> str:
        if name in given:
            return "user"
        return "env" if self.sources.get(name, "").startswith(PREFIX) else "config"


READERS = readers_of(Settings)
del READERS["sources"]


def _read(name: str, value: Any, where: str) -> Any:  # noqa: ANN401  # a setting's own type
    if name not in READERS:
        near = nearest(name, READERS)
        guess = f"did you mean {near}?" if near else f"known: {', '.join(READERS)}"
        raise SettingsError(f"{where}: no setting has this name; {guess}")
    try:
        return READERS[name](where, value)
    except InvalidInput as error:
        raise SettingsError(str(error)) from None
