"""An engine that runs attnmux, for `attnmux select --engine`.

An integration advertises a module in the entry-point group `attnmux.engines`, as NAME = MODULE,
with the functions of `Integration`. The module imports neither the engine nor torch.

The request of a model becomes that of the engine (`ask`), which the verb solves. The line that
starts the engine has all inputs of a decision: the verb writes attnmux's settings as variables, and
`launch` the engine's own options.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Protocol, TypeVar

from attnmux.core.choosing.choice import Choice
from attnmux.core.choosing.decision import Decision
from attnmux.core.cli.asking import Asked
from attnmux.core.facts.errors import AttnmuxError, InvalidInput, NoBackend
from attnmux.core.facts.libraries import entry_points, identity
from attnmux.core.facts.platform import Platform
from attnmux.core.facts.policy import NAMING
from attnmux.core.facts.request import Request
from attnmux.core.facts.vendors import VENDORS
from attnmux.core.find.plugins import is_admitted
from attnmux.core.find.settings import PREFIX, Settings

GROUP = "attnmux.engines"
OWN = ("sglang", "vllm")
"""Engines of this project's integrations: no other name is suggested to pip."""
KERNELS = "attnmux.kernels"
"""The same group as in `shared_kernels.py`, which imports torch."""
MODEL = "MODEL"
"""Stands for the model that the user did not name."""
FACTS = (
    *("kind", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "kv_lora_rank"),
    *("qk_rope_head_dim", "index_topk", "index_block_size", "encoder_head_dim"),
    *("sliding_window", "attention_chunk", "cross_attention", "sinks", "alibi", "relative_bias"),
    *("logit_cap", "multimodal", "other_layers", "compressed_layers", "linear_layers"),
    *("linear_head_dim", "linear_v_head_dim"),
)
"""Fields of a request that an engine reads from the model."""

T = TypeVar("T")


class Integration(Protocol):
    """The module of an engine's integration. Every refusal is an InvalidInput."""

    def ask(self, request: Request, platform: Platform) -> Request:
        """The request that the integration makes in the engine, for a model with this one.

        A field that the engine neither reads from the model nor has an option for is refused, and
        so are requests that the integration refuses when the engine starts. A `graph` that is not
        the user's is dropped if no backend serves it.
        """

    def launch(
        self, decision: Decision, model: str, *, tp: int, kv_dtype_skip: str | None
    ) -> list[str]:
        """The options of the engine's own command, with all inputs of the decision: tp, dtype, KV
        dtype, page size, determinism, drafts, the device. model: a folder or a hub id.
        tp: ranks that share the heads. kv_dtype_skip: layers that keep K and V in the model's
        dtype, as `request_from_model` takes them.

        Backends that the user named, their options and other settings of attnmux are variables,
        which the verb writes.
        """

    def install(self, decision: Decision, plugins: Sequence[str]) -> list[str]:
        """pip's arguments that install the engine, the integration and the plugins on the
        decision's platform.

        plugins: requirements with the extras of the decision's backends, such as
        "attnmux-nvidia[fa3]".
        """


@dataclass(frozen=True, slots=True)
class Engine:
    """An installed integration."""

    name: str
    point: EntryPoint
    module: Integration

    def ask(self, request: Request, platform: Platform) -> Request:
        """The integration's request. Raises NoBackend for requests that it refuses."""
        return self._called(lambda: self.module.ask(request, platform))

    def lines(
        self, asked: Asked, model: str | None, *, tp: int, skip: str | None, measured: bool
    ) -> tuple[str, ...]:
        """The line that installs the engine on the decision's machine, and the one that starts it;
        none if not all layers have a backend. model, tp, skip: as `requested` takes them.

        Raises NoBackend for a decision that the engine cannot follow.
        """
        decision = asked.answer
        if isinstance(decision, NoBackend) or decision.unserved_layers:
            return ()
        plugins, chosen = list(_plugins(decision, asked)), model or MODEL
        install = self._called(lambda: self.module.install(decision, plugins))
        words = self._called(
            lambda: self.module.launch(decision, chosen, tp=tp, kv_dtype_skip=skip)
        )
        variables = self._called(lambda: list(_variables(asked, measured=measured)))
        quoted = [f"{PREFIX}{name.upper()}={shlex.quote(value)}" for name, value in variables]
        start = " ".join([*quoted, shlex.join(map(str, words))])
        return f"pip install {shlex.join(map(str, install))}", start

    def _called(self, function: Callable[[], T]) -> T:
        try:
            return function()
        except InvalidInput as refusal:
            raise NoBackend(f"attnmux in {self.name}: {refusal}") from refusal
        except Exception as error:
            whose = identity(self.point.dist)[0]
            message = f"{self.point.value} of {whose} failed: {AttnmuxError.in_brief(error)}"
            raise AttnmuxError(message) from error


def engine_named(name: str, settings: Settings) -> Engine:
    """The installed integration of that engine. Raises InvalidInput if there is none, and
    AttnmuxError for one that cannot be imported."""
    allow, deny = settings.plugin_filter()
    known = {
        point.name: point
        for point in entry_points(GROUP)[0]
        if is_admitted(identity(point.dist)[0], allow, deny)
    }
    if name not in known:
        expected = f"one of {', '.join(sorted(known))}" if known else "an installed integration"
        if name in OWN:
            expected += f" (pip install attnmux-{name} adds {name})"
        raise InvalidInput("--engine", got=name, expected=expected)
    point = known[name]
    try:
        module: Any = point.load()
    except Exception as error:
        whose = identity(point.dist)[0]
        raise AttnmuxError(
            f"{point.value} of {whose} failed: {AttnmuxError.in_brief(error)}"
        ) from error
    return Engine(name, point, module)


def check_facts(request: Request, model: str | None) -> None:
    """Raise InvalidInput for a fact of the named model that the user overruled: the engine reads it
    from the model."""
    for name in FACTS if model is not None else ():
        if request.origins.get(name) == "user":
            expected = f"none with --engine: the engine reads it from {model}"
            raise InvalidInput(name, got=getattr(request, name), expected=expected)


def _plugins(decision: Decision, asked: Asked) -> Iterator[str]:
    """Requirements of the decision's backends with their extras, of the plugin that finds the
    device and of those with kernels for it, each once."""
    device = decision.platform
    offers = {offer.address: offer for offer in asked.offers}
    extras: dict[str, set[str]] = {}
    if device.vendor in VENDORS:
        extras[VENDORS[device.vendor].distribution] = set()
    for choice in _choices(decision):
        offer = offers[choice.address]
        extras.setdefault(offer.distribution, set()).update(filter(None, [offer.card.extra]))
    allow, deny = asked.settings.plugin_filter()
    for point in entry_points(KERNELS)[0]:
        owner = identity(point.dist)[0]
        if point.name.endswith(f".{device.device_type}") and is_admitted(owner, allow, deny):
            extras.setdefault(owner, set())
    for distribution, extra in extras.items():
        yield f"{distribution}[{','.join(sorted(extra))}]" if extra else distribution


def _choices(decision: Decision) -> Iterator[Choice]:
    """Every backend that may run."""
    yield from (choice for _, choice in decision.choices)
    yield from (choice for *_, choice in decision.part_choices)


def _variables(asked: Asked, *, measured: bool) -> Iterator[tuple[str, str]]:
    """(setting, value) of all that the command line set for attnmux itself. measured: whether
    measurements counted."""
    flags, settings, policy = asked.given, asked.settings, asked.policy
    if flags["without"]:
        got, expected = ", ".join(sorted(flags["without"])), "none with --engine, which has them"
        raise InvalidInput("--without", got=got, expected=expected)
    for name in NAMING:
        overruled = getattr(settings, name) and getattr(policy, name) is None
        if flags.get(name) or overruled:
            yield name, flags.get(name) or ""
    options = [
        f"{backend}.{option}={value}"
        for backend, values in policy.options.items()
        for option, value in values.items()
    ]
    from_options = {name for name, source in settings.sources.items() if source.startswith("--")}
    set_here = {
        "options": ",".join(options) if flags["options"] else "",
        "allow_coercion": "true" if flags["allow_coercion"] else "",
        "no_measurements": "" if measured else "true",
        "platform": asked.platform or "" if asked.device.is_here else "",
        "no_plugins": "true" if "no_plugins" in from_options else "",
        "no_shipped_figures": "true" if "no_shipped_figures" in from_options else "",
    }
    yield from ((name, value) for name, value in set_here.items() if value)
