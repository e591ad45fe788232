"""The request of a verb and the answer for one machine: for `select` and verbs that measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from attnmux.core.cards.card import Offer
from attnmux.core.choosing.decision import Decision
from attnmux.core.choosing.dtype_hint import dtype_hint
from attnmux.core.choosing.solver import solve
from attnmux.core.cli.run import Run
from attnmux.core.facts.errors import AttnmuxError, InvalidInput, NoBackend
from attnmux.core.facts.libraries import entry_points, installed_version
from attnmux.core.facts.platform import GRAMMAR, Platform
from attnmux.core.facts.policy import Policy
from attnmux.core.facts.request import Request, parse_fields
from attnmux.core.facts.vendors import VENDORS
from attnmux.core.find.graphs import with_graphs
from attnmux.core.find.plugins import Plugins
from attnmux.core.find.settings import Settings

if TYPE_CHECKING:
    from attnmux.core.measured.measurement import Measurement


READERS = "attnmux.configs"
"""The entry points that read a model's files; the name is the file's."""


class Asked(NamedTuple):
    """A question to one machine, the settings that it read, and the answer."""

    request: Request
    device: Platform
    policy: Policy
    offers: tuple[Offer, ...]
    settings: Settings
    given: Mapping[str, Any]
    """Fields of the policy set on the command line."""
    platform: str | None
    """The platform named on the command line."""
    answer: Decision | NoBackend
    measurements: tuple[Measurement, ...] = ()
    """Measurements of this machine that the answer followed."""

    @property
    def is_measured(self) -> bool:
        """Whether something was measured here, or a plugin carries figures of such a device."""
        return bool(self.measurements) or _is_carried(self.offers, self.device)


def _is_carried(offers: Sequence[Offer], device: Platform) -> bool:
    return any(figure.hold_on(device) for offer in offers for figure in offer.figures)


ASSUME = (
    "Read a --model of an unknown model_type as causal attention (that of an encoder as attention "
    "over whole sequences), with a warning. Without it, exits with 3."
)


def requested(
    model: str | None,
    fields: Sequence[str],
    tp: int,
    mode: str | None,
    *,
    skip: str | None = None,
    assume: Callable[[str], None] | None = None,
) -> Request:
    """The model's needs, overruled by the user's fields.

    fields: texts as `Request.parse` takes them.
    skip: layers without the KV dtype. assume: called with what is assumed of an unknown model type;
    None assumes nothing.
    Raises NoBackend for a type of whose attention nothing is known, and InvalidInput for a model
    or fields that cannot be read, for layers that cannot be skipped, and for `tp` and `skip`
    without a model.
    """
    if model is None and tp > 1:
        raise InvalidInput("--tp", got=str(tp), expected="--model, whose heads it divides")
    if model is None and skip is not None:
        raise InvalidInput("--kv-dtype-skip", got=skip, expected="--model, whose layers it names")
    changes = parse_fields(*fields)
    request = Request()
    if model is not None:
        named = {name: changes[name] for name in ("dtype", "kv_dtype") if name in changes}
        known = Request().replace(**named)
        read = _reader_of_models()
        read = partial(read, model, tp=tp, dtype=known.dtype, kv_dtype=known.kv_dtype)
        try:
            request = read(kv_dtype_skip=skip)
        except NoBackend as unknown:
            if assume is None or not unknown.assumed:
                raise
            assume(unknown.assumed)
            request = read(kv_dtype_skip=skip, assume=True)
    if mode is not None:
        changes["speculative_attention_mode"] = mode
    return request.replace(**changes)


def _reader_of_models() -> Callable[..., Request]:
    """`attnmux.configs.request_from_model`, which core does not import: it stands on core."""
    points = [point for point in entry_points(READERS)[0] if point.name == "config.json"]
    if not points:
        remedy = "pip install --force-reinstall attnmux-core"
        raise AttnmuxError(f"no entry point in {READERS!r} reads models: {remedy}")
    return cast("Callable[..., Request]", points[0].load())


def machine(
    run: Run,
    settings: Settings,
    plugins: Plugins,
    wanted: str | None,
    *,
    elsewhere: bool = True,
    device: str = "",
) -> Platform:
    """The platform that a question is about: of this machine, or described by its name.

    elsewhere: whether an error suggests that there are such questions. device: torch's name; it
    decides among several kinds of its type.
    """
    if wanted is None:
        detection = run.detect(plugins)
        kind = device.partition(":")[0]
        if sum(platform.device_type == kind for platform in detection.platforms) > 1:
            import torch  # noqa: PLC0415  # most questions need none

            from attnmux.core.engines.device_platforms import platform_of  # noqa: PLC0415  # imports torch

            named = settings.where("platform")
            return platform_of(torch.device(device), detection, settings.platform, named=named)
        return detection.pick(settings.platform, named=settings.where("platform"))
    if Platform.describes(wanted):
        return Platform.parse(wanted)
    try:
        return run.detect(plugins).pick(wanted, named="--platform")
    except InvalidInput as error:
        if not elsewhere:
            raise
        expected = f"{error.expected}; or, for a machine elsewhere, {GRAMMAR}"
        raise InvalidInput("--platform", got=error.got, expected=expected) from None


def ask(
    run: Run,
    settings: Settings,
    plugins: Plugins,
    request: Request,
    platform: str | None,
    given: Mapping[str, Any],
    *,
    measured: bool,
    graphs: bool = True,
    of_engine: Callable[[Request, Platform], Request] | None = None,
) -> Asked:
    """Decide for one machine, with the warnings that belong to it.

    graphs: whether to request graphs if the device has them. of_engine: makes an engine's request
    instead; it raises NoBackend for requests that it refuses.
    """
    device = machine(run, settings, plugins, platform)
    policy, offers = settings.policy(**given), plugins.offers()
    answer: Decision | NoBackend
    measurements = run.measurements(settings) if measured and device.is_here else ()
    try:
        if of_engine is not None or graphs:
            request = (of_engine or with_graphs)(request, device)
        answer = decided(request, device, offers, policy, measurements)
        answer = with_eager_note(answer)
        run.warn_of_unverified(answer, offers, measurements)
        if hint := dtype_hint(answer, offers, policy):
            run.warn(hint)
    except NoBackend as refusal:
        answer = refusal
    if not device.is_here or isinstance(answer, NoBackend):
        _warn_of_absent_plugin(run, offers, device.vendor)
    fields = (request, device, policy, offers, settings, given, platform, answer)
    return Asked(*fields, measurements=measurements)


def with_eager_note(decision: Decision) -> Decision:
    """A note instead of the change if graphs were dropped that only the platform requested."""
    dropped = [
        coercion
        for coercion in decision.coercions
        if (coercion.field, coercion.origin) == ("graph", "platform")
    ]
    if not dropped:
        return decision
    note = f"decode runs eagerly, without device graphs: {dropped[0].because}"
    kept = tuple(coercion for coercion in decision.coercions if coercion not in dropped)
    return replace(decision, coercions=kept, notes=(*decision.notes, note))


def decided(
    request: Request,
    device: Platform,
    offers: Sequence[Offer],
    policy: Policy,
    measurements: Sequence[Measurement],
) -> Decision:
    """The decision, with this machine's measurements and the plugins' figures if there are any."""
    if not measurements and not _is_carried(offers, device):
        return solve(request, device, offers, policy)
    # Not imported unless something was measured
    from attnmux.core.measured.ranking import solve_measured  # noqa: PLC0415

    return solve_measured(request, device, offers, policy, measurements=measurements)


def _warn_of_absent_plugin(run: Run, offers: Sequence[Offer], vendor: str) -> None:
    """Without the vendor's own plugin, the answer differs from the one on a real machine."""
    row = VENDORS.get(vendor)
    offering = {offer.distribution for offer in offers}
    if row is not None and offering and row.distribution not in offering:
        there = installed_version(row.distribution) is not None
        fix = "is left out or broken" if there else f"is missing: pip install {row.distribution}"
        run.warn(
            f"{row.distribution}, which serves {vendor}, {fix}; only other plugins were considered"
        )
