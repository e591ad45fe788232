"""Adapters of kernel libraries: the base class, and where the kernels come from.

An adapter declares its kernels as a dataclass of functions, names the packages that provide them,
and fills in the hooks of `LibraryBackend`. Layers are prepared once, steps twice (on the host, then
on the device), and buffers that captured graphs point at stay where they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from typing import Any, Generic, TypeVar

import torch

from attnmux.core.contract.backend import AttentionBackend
from attnmux.core.contract.batch import ForwardBatch
from attnmux.core.contract.call import AttentionCall
from attnmux.core.contract.context import BackendContext
from attnmux.core.contract.layer import LayerSpec
from attnmux.core.contract.mode import ForwardMode
from attnmux.core.contract.steps import NO_OPTIONS, StepBackend, prepared
from attnmux.core.facts.errors import AttnmuxError, BackendFailed, GraphUnsupported, InvalidInput

K = TypeVar("K")
"""The kernels: a dataclass whose fields are functions of the library."""
L = TypeVar("L")
"""A prepared layer: the arguments that no step changes."""
S = TypeVar("S")
"""A prepared step."""
T = TypeVar("T")
B = TypeVar("B")
"""The buffers that graphs of a step replay with."""
A = TypeVar("A", bound="StepBackend")
"""The backend: of attention or of linear layers."""


class LibraryBackend(AttentionBackend, Generic[K, L, S, B]):
    """The base of a backend that calls a kernel library.

    A subclass prepares layers (`prepare_layer`), plans a step on the host (`plan_step`), fills its
    tensors on the device (`fill_step`), allocates the tensors that graphs replay with
    (`make_buffers`) and calls the library (`attend`).
    """

    def __init__(
        self,
        context: BackendContext,
        options: Mapping[str, object],
        kernels: K,
        layers: Iterable[LayerSpec] | None = None,
    ) -> None:
        """layers: those that the backend serves; by default every layer of the context.

        Raises InvalidInput for layers, pools and options that the kernels do not serve.
        """
        super().__init__(context, options)
        self.kernels = kernels
        self._layers: dict[int, L] = {
            layer.layer_id: self.prepare_layer(layer)
            for layer in (context.layers if layers is None else layers)
        }
        self._buffers: list[B] = []  # the last has room for the most; captured graphs read the rest
        self._max_bs = 0
        self._max_num_tokens = 0
        self._step: S | None = None

    @abstractmethod
    def prepare_layer(self, layer: LayerSpec) -> L:
        """Check a layer and make its constant arguments. Called once, while constructing."""

    @abstractmethod
    def plan_step(self, batch: ForwardBatch, buffers: B | None) -> S:
        """Decide a step's shape on the host, outside of graphs. A library's `plan()` runs here.

        buffers: the tensors of a captured step; None for an eager step and before a replay.
        Raises InvalidInput for a step that the kernels do not serve.
        """

    @abstractmethod
    def fill_step(self, step: S, batch: ForwardBatch) -> None:
        """Build the step's tensors by device operations of static shape, which graphs replay."""

    @abstractmethod
    def make_buffers(self, max_bs: int, max_num_tokens: int) -> B:
        """Allocate the fixed tensors of graphs of up to `max_bs` requests and `max_num_tokens`
        tokens.

        Raises GraphUnsupported if the backend cannot be captured.
        """

    @abstractmethod
    def attend(self, call: AttentionCall, layer: L, step: S, batch: ForwardBatch) -> torch.Tensor:
        """Call the library for a step with at least one query.

        Returns like `AttentionBackend.forward_decode`.
        """

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Plan the step. Raises InvalidInput or GraphUnsupported; then no step is prepared."""
        self._step = None
        if batch.forward_mode is not ForwardMode.IDLE:
            self._step = self.plan_step(batch, self._room_for(batch) if in_capture else None)

    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        if self._step is not None:
            self.fill_step(self._step, batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_bs > self._max_bs or max_num_tokens > self._max_num_tokens:
            most = max(max_bs, self._max_bs), max(max_num_tokens, self._max_num_tokens)
            self._buffers.append(self.make_buffers(*most))
            self._max_bs, self._max_num_tokens = most

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, batch)

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        return self._attend(call, batch)

    def _attend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        step = prepared(self._step)
        layer = self._layers.get(call.layer.layer_id)
        if layer is None:
            raise InvalidInput(
                "layer",
                got=f"{call.layer.kind}, id {call.layer.layer_id}",
                expected=f"one of the layers that the backend serves: {sorted(self._layers)}",
            )
        if not call.q.shape[0]:
            return call.empty_result()
        return self.attend(call, layer, step, batch)

    @staticmethod
    def filled(tensors: T | None) -> T:
        """The result of `fill_step`. Raises AttnmuxError before it ran."""
        if tensors is None:
            raise AttnmuxError(
                "the step is planned but not filled: call init_forward_metadata(batch)"
            )
        return tensors

    def _room_for(self, batch: ForwardBatch) -> B:
        if batch.batch_size > self._max_bs or batch.num_tokens > self._max_num_tokens:
            raise GraphUnsupported(
                f"a batch of {batch.batch_size} requests and {batch.num_tokens} tokens is captured "
                f"with buffers for {self._max_bs} and {self._max_num_tokens}: call "
                "init_cuda_graph_state with the largest first"
            )
        return self._buffers[-1]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KernelLibrary(Generic[K, A]):
    """Where a backend's kernels come from. It is callable: a card's `factory` names it."""

    address: str
    """The backend's, "plugin/name", for errors."""
    backend: Callable[[BackendContext, Mapping[str, object], K], A]
    providers: Mapping[str, Callable[[], K]]
    """How each package that has the kernels provides them, in the order of trial. A provider
    imports the package: see `imported`."""
    trial: Callable[[A], None]
    """Launches the kernels once, on the smallest input: a build for other devices imports, and
    fails only when it is launched. A library that compiles its kernels compiles them here."""
    hint: str = ""
    """The remedy if the trial fails."""

    def __call__(self, context: BackendContext, options: Mapping[str, object] = NO_OPTIONS) -> A:
        """The backend on the first package that is installed and runs on the context's device.

        Raises BackendFailed if none does, with each one's reason; InvalidInput for layers,
        pools and options that the kernels do not serve.
        """
        reasons: list[str] = []
        for package, provide in self.providers.items():
            try:
                kernels = provide()
            except (ImportError, OSError, AttributeError) as error:  # the last: another version
                reasons.append(f"{package}: {AttnmuxError.in_brief(error)}")
                continue
            try:
                with self.trying(self.address, context.device, hint=self.hint):
                    backend = self.backend(context, options, kernels)
                    self.trial(backend)
            except BackendFailed as error:
                reasons.append(f"{package}: {error.reason}")
                continue
            return backend
        raise BackendFailed(self.address, "; ".join(reasons), hint=self.hint)

    @staticmethod
    def imported(kernels: Callable[..., K], *modules: str) -> K:
        """The kernels dataclass, each field from the first of the modules that has that name.
        Fields with a default keep it.

        Raises ImportError if a module is missing, AttributeError if a function is.
        """
        loaded = [import_module(module) for module in modules]

        def find(name: str) -> Any:  # noqa: ANN401  # a function of the library
            for module in loaded:
                if hasattr(module, name):
                    return getattr(module, name)
            raise AttributeError(f"{' and '.join(modules)} have no {name!r}")

        functions = [field.name for field in fields(kernels) if field.default is MISSING]  # type: ignore[arg-type]  # a dataclass
        return kernels(**{name: find(name) for name in functions})

    @staticmethod
    @contextmanager
    def trying(address: str, device: torch.device, *, hint: str = "") -> Iterator[None]:
        """Turn whatever a library or its compiler raises into BackendFailed. Synchronises on exit.

        Errors of attnmux and a full device pass through.
        """
        try:
            yield
            # Launches report their errors later, on every accelerator.
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
        except (AttnmuxError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise BackendFailed(address, AttnmuxError.in_brief(error), hint=hint) from error
