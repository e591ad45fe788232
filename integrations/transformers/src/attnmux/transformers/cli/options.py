"""The options of `attnmux generate`, in groups by who reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from attnmux.core import InvalidInput, Offer
from attnmux.core.verbs import offers_named, read_assignments
from attnmux.parts import AcceptThresholds
from attnmux.transformers.cli.drafts import Drafting
from attnmux.transformers.cli.ranks import Parallel
from attnmux.transformers.requests.memory_budget import MemoryBudget

Group = TypeVar("Group")
BACKENDS = ("backend", "prefill_backend", "decode_backend", "mm_backend", "linear_backend")


@dataclass(frozen=True, kw_only=True, slots=True)
class Answering:
    """Options for prompts, and for the form of answers."""

    model: str | None
    """None: the one that ships."""
    revision: str | None
    chat: bool
    decoder_prompt: str | None
    """The text that begins an encoder-decoder model's answers; None: as its checkpoint says."""
    max_new_tokens: int
    context: int | None
    """Tokens of the longest request; None: the model's limit."""
    max_running: int
    prefill_tokens: int
    as_json: bool
    no_stream: bool
    states_sampling: bool
    """Whether the command line says how tokens are drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watching:
    """Checks by attnmux-testing while the engine runs."""

    canary: float
    """Share of the steps that the reference repeats."""
    keep_failures: Path | None
    """Folder for steps that fail."""
    keep_values: bool

    @property
    def is_set(self) -> bool:
        return self.canary > 0 or self.keep_failures is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """All options of the command."""

    answering: Answering
    watching: Watching
    drafting: Drafting
    parallel: Parallel
    accept: AcceptThresholds
    memory: MemoryBudget | None
    backends: Mapping[str, Any]
    """Arguments of `Settings.policy`."""
    running: Mapping[str, Any]
    """Fields of `RunnerOptions`."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """given: arguments of `command.generate`, by name.

        Raises InvalidInput for options that exclude each other, or that want another.
        """
        left = dict(given)
        memory = left.pop("memory")
        accept = AcceptThresholds(
            single=left.pop("accept_threshold_single"), acc=left.pop("accept_threshold_acc")
        )
        drafting = Drafting(
            attention_mode=left["speculative_attention_mode"],
            backend=left.pop("draft_backend"),
            always=left.pop("draft_always"),
            **{name: left.pop(name) for name in ("draft", "draft_tokens", "topk", "steps")},
        )
        options = cls(
            answering=_taken(Answering, left),
            watching=_taken(Watching, left),
            drafting=drafting,
            parallel=_taken(Parallel, left),
            accept=accept,
            memory=None if memory is None else MemoryBudget.parse(memory),
            backends={
                **{name: left.pop(name) for name in BACKENDS},
                "options": read_assignments("--set", left.pop("assignments")),
            },
            running={
                **left,
                "graph_sizes": _sizes("--graph-sizes", left["graph_sizes"]),
                "piece_sizes": _piece_sizes(left["piece_sizes"]),
            },
        )
        options._check()
        return options

    def check_used(self, offers: Sequence[Offer], *, images: bool) -> None:
        """Refuse options of parts that the prompts do not have, before a model is loaded.

        Raises InvalidInput, and UnknownBackend for a backend that no plugin offers.
        """
        for name in (self.backends["mm_backend"], self.backends["linear_backend"]):
            if name is not None:
                offers_named(name, offers)
        if self.backends["mm_backend"] is not None and not images:
            raise InvalidInput("--mm-backend", got="no image", expected="--image with it")

    def check_linear(self, may_have_linear: Callable[[], bool]) -> None:
        """Raise InvalidInput for options of linear layers, unless the model may have some.

        may_have_linear: asked only if such an option is given.
        """
        backend_options = {**self.backends, **self.running}
        for name in ("linear_backend", "kept_states"):
            if backend_options[name] is not None and not may_have_linear():
                raise InvalidInput(
                    f"--{name.replace('_', '-')}",
                    got="a model with softmax attention in all layers",
                    expected="one with linear layers",
                )

    def _check(self) -> None:
        if not self.accept.exact and self.drafting.draft is None:
            expected = "--draft with it"
            raise InvalidInput("--accept-threshold-*", got="one below 1", expected=expected)
        self.parallel.check(self.drafting, watched=self.watching.is_set)
        if self.running["sparse"] is not None:
            self._check_sparse()

    def _check_sparse(self) -> None:
        """Refuse options that decoding over chosen pages excludes."""
        flags = {
            "--dcp": self.parallel.dcp,
            "--pcp": self.parallel.pcp is not None,
            "--canary": self.watching.canary > 0,
        }
        got = " and ".join(option for option, is_set in flags.items() if is_set)
        if got:
            expected = "none of these: one device has all keys, and answers are approximate"
            raise InvalidInput("--sparse", got=f"{got} too", expected=expected)


def _piece_sizes(text: str | None) -> tuple[int, ...] | None:
    """Numbers of tokens, ascending; () for "none". Raises InvalidInput for other text."""
    return () if text == "none" else _sizes("--piece-sizes", text)


def _sizes(option: str, text: str | None) -> tuple[int, ...] | None:
    """Sizes, ascending. Raises InvalidInput for other text."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InvalidInput(option, got=repr(text), expected="sizes, such as 1,2,4,8")
    return tuple(sorted(set(map(int, parts))))


def _taken(kind: type[Group], left: dict[str, Any]) -> Group:
    """The group whose fields are options by their names, which `left` then lacks."""
    return kind(**{field.name: left.pop(field.name) for field in fields(kind)})  # type: ignore[arg-type]  # a dataclass
