"""A backend under test, with its card and its machine, and the outcome of a case on it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from attnmux.core import (
    Choice,
    FrozenMapping,
    InvalidInput,
    Offer,
    Platform,
    Plugins,
    Policy,
    Reason,
    Request,
    TunedLaunch,
)
from attnmux.core.plugin import BackendCard, OptionValue, installed_version
from attnmux.core.verbs import AXES, Question, check, offers_named, read_options, standing
from attnmux.testing.cases.linear import AnyCase, in_dims_of, linear_cases, linear_in_graphs
from attnmux.testing.cases.standard import PAGE_SIZES, in_graphs, standard_cases

if TYPE_CHECKING:
    from attnmux.core import AttentionBackend, BackendContext
    from attnmux.core.plugin import LinearAttentionBackend
    from attnmux.testing.setup.case import Graphs

    Factory = Callable[[BackendContext, Mapping[str, object]], object]

MACHINE_AXES = frozenset(
    [*(axis.name for axis in AXES if axis.of_machine), "requires", "contract", "policy"]
)
"""Axes whose refusals only another machine or installation can change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFigures:
    """Time and error of one step of a case."""

    dtype: str
    keys: int
    """Tokens of the longest request after the step."""
    ms: float
    """Wall time of the step's preparation and of all layers' calls, compiling included."""
    rms: float
    """The largest `rms` of the layers; see `attnmux.testing.Errors`."""
    worst: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one case."""

    case: str
    execution: Literal["eager", "graph"] = "eager"
    """How its steps were run."""
    status: Literal["passed", "failed", "refused"]
    """Refused: the card does not admit the case, and the selector said so with reasons."""
    max_error: float = 0.0
    """The largest absolute difference from the reference in output and LSE."""
    steps: tuple[StepFigures, ...] = ()
    """Figures of those steps of a passed case that have an output that is not 0."""
    message: str = ""
    """The error, and where it occurred."""
    reasons: tuple[Reason, ...] = ()
    error: Exception | None = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "execution": self.execution,
            "status": self.status,
            "max_error": self.max_error,
            "steps": [asdict(step) for step in self.steps],
            "message": self.message,
            "reasons": [str(reason) for reason in self.reasons],
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidate:
    """A backend under test, and the machine that it runs on."""

    card: BackendCard
    platform: Platform
    plugin: str = ""
    device: str = ""
    """torch's name of the device for tensors; by default the platform's."""
    options: Mapping[str, OptionValue] = field(default_factory=FrozenMapping)
    """Options that differ from the card's defaults."""
    factory: Factory | None = None
    """Called instead of the card's factory."""
    launches: tuple[TunedLaunch, ...] = ()
    """See `BackendContext.launches`."""
    graphs: Graphs | None = None
    """Makes the graphs of cases with attention; by default the device's, on a CPU recordings."""

    def __post_init__(self) -> None:
        if not self.device:
            object.__setattr__(self, "device", self.platform.device_type)

    @property
    def address(self) -> str:
        """`plugin/name`."""
        return f"{self.plugin}/{self.card.name}"

    @property
    def fp8_products(self) -> bool:
        """As `BackendCard.has_fp8_products` with these options."""
        return self.card.has_fp8_products(self.options)

    def refusals(self, request: Request, platform: Platform | None = None) -> tuple[Reason, ...]:
        """Why the selector would not choose the backend for the request; () if it would.

        `platform` defaults to the candidate's.
        """
        platform = platform or self.platform
        verdicts = (
            check(self.card, phase, request, platform, plugin=self.plugin)
            for phase in request.phases
        )
        return tuple(reason for verdict in verdicts for reason in verdict.reasons)

    @property
    def stands(self) -> bool:
        """Whether no library is missing and the contract is known, whatever is asked."""
        offer = Offer(card=self.card, plugin=self.plugin)
        return not standing(offer, Policy(), installed_version)

    def admits(self, case: AnyCase) -> bool:
        """Whether the selector would choose the backend for the case's request."""
        return any(self.admitted([case]))

    def admitted(self, cases: Iterable[AnyCase]) -> Iterator[AnyCase]:
        """The cases that have no `refusals`, whose reasons take most of the time."""
        if not self.stands:
            return
        for case in cases:
            if all(self.card.serves(each) for each in _questions(case, self.platform)):
                yield case

    def cases(self, page_sizes: Collection[int] = ()) -> tuple[AnyCase, ...]:
        """The standard cases of the card's kinds, in the usual page sizes and those that it names.

        page_sizes: use these sizes instead.
        Cases of linear layers have the dims that the card names, where it refuses the usual ones.
        If the card declares graphs, cases with a step that a graph can serve are listed twice.
        """
        with_graphs = any(clause.graph.admits(True) for clause in self.card.clauses)
        linear: tuple[AnyCase, ...] = ()
        if self._serves(Request.LINEAR_KINDS):
            fixed = tuple(in_dims_of(self.card, case) for case in linear_cases())
            linear = fixed + (linear_in_graphs(fixed) if with_graphs else ())
        if linear and not self._serves(set(Request.KINDS).difference(Request.LINEAR_KINDS)):
            return linear
        named = {
            size
            for clause in self.card.clauses
            for size in clause.page_size.examples()
            if isinstance(size, int)
        }
        sizes = sorted(page_sizes) or (*PAGE_SIZES, *sorted(named.difference(PAGE_SIZES)))
        cases = standard_cases(sizes)
        if page_sizes:
            cases = tuple(case for case in cases if case.page_size in page_sizes)
        if with_graphs:
            cases += in_graphs(cases)
        return cases + linear

    def _serves(self, kinds: Collection[str]) -> bool:
        return any(clause.kind.admits(kind) for clause in self.card.clauses for kind in kinds)

    def build(self, context: BackendContext) -> AttentionBackend:
        """Make the backend as an engine would."""
        from attnmux.core import make_backend  # noqa: PLC0415  # torch
        from attnmux.core.plugin import with_shared_kernels  # noqa: PLC0415  # torch

        return make_backend(self._choice(), with_shared_kernels(context), self.factory)

    def build_with(
        self, options: Iterable[tuple[str, OptionValue]], context: BackendContext
    ) -> AttentionBackend:
        """Build the backend with these options besides the candidate's.

        An option that the backend refuses for this request, as an InvalidInput that ends in its
        name, is left out.
        """
        chosen = dict(options)
        while True:
            given = FrozenMapping({**self.options, **chosen})
            try:
                return replace(self, options=given).build(context)
            except InvalidInput as error:
                if chosen.pop(error.argument.rpartition(".")[2], None) is None:
                    raise

    def build_linear(self, context: BackendContext) -> LinearAttentionBackend:
        """Make a backend of linear layers as an engine would."""
        from attnmux.core import make_linear  # noqa: PLC0415  # torch

        return make_linear(self._choice(), context, self.factory)

    def _choice(self) -> Choice:
        return Choice.of(Offer(card=self.card, plugin=self.plugin), self.options)


@lru_cache(maxsize=8192)
def _questions(case: AnyCase, platform: Platform) -> tuple[Question, ...]:
    """A case's questions, which are the same for every backend of a platform."""
    request = case.request
    return tuple(
        Question(request=request, platform=platform, phase=phase) for phase in request.phases
    )


def find_candidate(
    name: str,
    *,
    device: str = "",
    options: Mapping[str, OptionValue] | None = None,
    plugins: Plugins | None = None,
    platforms: Sequence[Platform] | None = None,
    launches: tuple[TunedLaunch, ...] = (),
) -> Candidate:
    """The installed backend of that name, on this machine.

    The platform is that of `device` ("cpu", "cuda:1"), or by default the first on which the card
    admits a case. `plugins` and `platforms` default to those of this machine.
    launches: as `BackendContext.launches`.
    Raises UnknownBackend for an unknown name; InvalidInput for a name that several backends share,
    for a device that is not present, and for an option that cannot be used.
    """
    plugins = plugins or Plugins.load()
    offer = _offer(name, plugins.offers())
    given = read_options({offer.address: options or {}}, plugins.offers())
    platforms = plugins.detect().platforms if platforms is None else platforms
    alike = [one for one in platforms if not device or one.device_type == device.partition(":")[0]]
    if device and len(alike) > 1:
        import torch  # noqa: PLC0415  # to read cards needs none

        from attnmux.core import Chooser  # noqa: PLC0415  # as above

        report = Chooser.reported_device(torch.device(device))
        alike = [one for one in alike if report is None or report.is_of(one)] or alike
    found = [
        Candidate(
            card=offer.card,
            plugin=offer.plugin,
            platform=platform,
            device=device,
            options=given.get(offer.address, {}),
            launches=launches,
        )
        for platform in alike
    ]
    if not found:
        present = ", ".join(sorted({platform.device_type for platform in platforms}))
        raise InvalidInput("device", got=repr(device), expected=f"one of {present}")
    if len(found) == 1:
        return found[0]
    return next((one for one in found if any(one.admitted(one.cases()))), found[0])


def _offer(name: str, offers: Sequence[Offer]) -> Offer:
    meant = offers_named(name, offers)
    exact = [offer for offer in meant if offer.card.name == name.rpartition("/")[2]]
    if len(exact or meant) > 1:
        addresses = ", ".join(offer.address for offer in meant)
        raise InvalidInput("backend", got=repr(name), expected=f"one of {addresses}")
    return (exact or list(meant))[0]
