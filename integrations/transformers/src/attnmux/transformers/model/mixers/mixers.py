"""Layers that mix tokens without softmax attention: recurrences and short convolutions.

transformers gives such a layer's kernel as a function of the model's own module, such as
`torch_chunk_gated_delta_rule`. A module that calls one is a mixer. Its forward gets functions of
ours in their place; the model's code runs unchanged, and no other model is touched. A module that
computes its recurrence in its own code is a mixer if `own_recurrences.py` has an adapter.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import ForwardContext, InvalidInput, LayerSpec, LinearLayerSpec
from attnmux.transformers.model.mixers.mixer import Convolution, Mixer, Recurrence
from attnmux.transformers.model.mixers.mixer_calls import FUNCTIONS
from attnmux.transformers.model.mixers.own_recurrences import ADAPTERS
from attnmux.transformers.model.part import ModelPart
from attnmux.transformers.options import RunnerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator


def bind(mixer: Mixer) -> None:
    """Give the module a forward that calls ours."""
    adapter = ADAPTERS.get(type(mixer.module).__name__)
    forward = _rebound(mixer) if adapter is None else adapter(mixer)

    def call(*args: object, **kwargs: object) -> object:
        mixer.num_convs = 0
        return forward(*args, **kwargs)

    mixer.module.forward = call  # an instance's own, which goes before its class's


def _rebound(mixer: Mixer) -> Callable[..., Any]:
    """The module's own code, in which the functions' names are ours."""
    original = inspect.unwrap(type(mixer.module).forward)
    ours = {name: partial(run, mixer) for name, run in FUNCTIONS.items() if calls(original, name)}
    forward = FunctionType(
        original.__code__,
        {**original.__globals__, **ours},
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )
    forward.__kwdefaults__ = original.__kwdefaults__
    return partial(forward, mixer.module)


def mixers_of(model: torch.nn.Module) -> tuple[Mixer, ...]:
    """The mixers of a model, in the model's order."""
    mixing = [pair for pair in model.named_modules() if _is_mixer(type(pair[1]))]
    return tuple(
        Mixer(number=number, name=name, module=module)
        for number, (name, module) in enumerate(mixing)
    )


def has_mixers(model_class: type[torch.nn.Module]) -> bool:
    """Whether a class beside the model's is one of mixers, as far as the code tells."""
    return any(map(_is_mixer, _beside(model_class)))


def has_attention(model_class: type[torch.nn.Module]) -> bool:
    """Whether a class beside the model's calls transformers' attention interface."""
    layers = _beside(model_class)
    return any(calls(inspect.unwrap(layer.forward), "ALL_ATTENTION_FUNCTIONS") for layer in layers)


def _beside(model_class: type[torch.nn.Module]) -> list[type[torch.nn.Module]]:
    beside = vars(sys.modules[model_class.__module__]).values()
    return [kind for kind in beside if isinstance(kind, type) and issubclass(kind, torch.nn.Module)]


def _is_mixer(layer: type[torch.nn.Module]) -> bool:
    if layer.__name__ in ADAPTERS:
        return True
    forward = inspect.unwrap(layer.forward)
    return any(calls(forward, name) for name in FUNCTIONS)


def calls(forward: object, name: str) -> bool:
    """Whether the function reads that name of its module."""
    code = getattr(forward, "__code__", None)
    return code is not None and name in code.co_names and name in forward.__globals__  # type: ignore[attr-defined]  # a function


@dataclass(kw_only=True, slots=True)
class MixerRecorder:
    """Writes down what mixers call, and runs each token as the first of its own request."""

    recurrences: dict[int, Recurrence] = field(default_factory=dict)
    convolutions: dict[int, list[Convolution]] = field(default_factory=dict)

    def recur(self, mixer: Mixer, asked: Recurrence) -> torch.Tensor:
        if mixer.number in self.recurrences:
            raise InvalidInput(mixer.name, got="a second recurrence", expected="one in each layer")
        self.recurrences[mixer.number] = asked
        group = asked.v.shape[1] // asked.q.shape[1]
        q, k = (_normed(tensor.float(), asked.qk_l2norm) for tensor in (asked.q, asked.k))
        met = asked.scaling * (q * k).sum(-1, keepdim=True).repeat_interleave(group, dim=1)
        v = asked.v if asked.beta is None else asked.beta.unsqueeze(-1) * asked.v
        return (met * v).to(asked.v.dtype)

    def convolve(self, mixer: Mixer, asked: Convolution, index: int) -> torch.Tensor:
        self.convolutions.setdefault(mixer.number, []).append(asked)
        out = asked.x * asked.weight[:, -1]
        out = out if asked.bias is None else out + asked.bias
        return torch.nn.functional.silu(out) if asked.silu else out

    def spec_of(self, mixer: Mixer, dtype: torch.dtype) -> LinearLayerSpec:
        """The layer, as it was recorded. Raises InvalidInput for a mixer that did not run, and for
        one that the contract cannot express."""
        convs = self.convolutions.get(mixer.number, [])
        sizes = {conv.weight.shape[1] for conv in convs}
        recurrence = self.recurrences.get(mixer.number)
        if len(sizes) > 1 or any(conv.x.dtype != dtype for conv in convs):
            got = f"convolutions of {sorted(sizes)} taps in {[conv.x.dtype for conv in convs]}"
            raise InvalidInput(mixer.name, got=got, expected=f"one number of taps, in {dtype}")
        if recurrence is None and not convs:
            raise InvalidInput(mixer.name, got="no call", expected="a layer that each step runs")
        shape = {} if recurrence is None else _shape(recurrence)
        return LinearLayerSpec(
            layer_id=mixer.number,
            kind="conv" if recurrence is None else recurrence.kind,  # type: ignore[arg-type]  # one of LINEAR_KINDS
            conv_dims=tuple(conv.weight.shape[0] for conv in convs),
            conv_size=max(sizes, default=0),
            **shape,
        )


def _shape(asked: Recurrence) -> dict[str, Any]:
    return {
        "num_k_heads": asked.k.shape[1],
        "num_v_heads": asked.v.shape[1],
        "head_k_dim": asked.k.shape[2],
        "head_v_dim": asked.v.shape[2],
        "scaling": asked.scaling,
        "qk_l2norm": asked.qk_l2norm,
    }


def _normed(x: torch.Tensor, normed: bool) -> torch.Tensor:
    return (
        x * torch.rsqrt(x.square().sum(-1, keepdim=True) + LinearLayerSpec.L2_EPS) if normed else x
    )


class OnBackend:
    """Runs mixers on the backends of the running step."""

    def recur(self, mixer: Mixer, asked: Recurrence) -> torch.Tensor:
        step, spec = ForwardContext.current(), _spec(mixer)
        backend = step.backend.linear(spec.kind)
        qkv = asked.q, asked.k, asked.v
        return backend.forward(*qkv, spec, step.batch, g=asked.g, beta=asked.beta)

    def convolve(self, mixer: Mixer, asked: Convolution, index: int) -> torch.Tensor:
        step, spec = ForwardContext.current(), _spec(mixer)
        return step.backend.linear(spec.kind).convolve(
            asked.x,
            asked.weight,
            spec,
            step.batch,
            bias=asked.bias,
            silu=asked.silu,
            index=index,
        )


def _spec(mixer: Mixer) -> LinearLayerSpec:
    assert mixer.spec is not None  # recorded before anything runs
    return mixer.spec


@contextmanager
def recording(mixers: Sequence[Mixer]) -> Iterator[MixerRecorder]:
    """Run the mixers of the block's calls on a recorder."""
    recorder = MixerRecorder()
    before = [mixer.runs for mixer in mixers]
    for mixer in mixers:
        mixer.runs = recorder
    try:
        yield recorder
    finally:
        for mixer, runs in zip(mixers, before, strict=True):
            mixer.runs = runs


@dataclass(kw_only=True, eq=False)
class Mixers(ModelPart):
    """The mixers of a model. Those of a probe are recorded; from `mark` on they run on the step's
    backends."""

    each: tuple[Mixer, ...]
    unpieced = "linear layers, which read the running step"
    uncompiled = (
        "a model with linear layers",
        "attention in every layer: a compiler would cut the model at each other one",
    )

    @classmethod
    def find(cls, model: torch.nn.Module, options: RunnerOptions) -> Mixers | None:
        mixers = mixers_of(model)
        return cls(each=mixers) if mixers else None

    def bind(self) -> None:
        for mixer in self.each:
            bind(mixer)

    def mark(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        for mixer in self.each:
            mixer.runs = OnBackend()
        return tuple(layers)

    @property
    def linear(self) -> tuple[LinearLayerSpec, ...]:
        return tuple(map(_spec, self.each))
