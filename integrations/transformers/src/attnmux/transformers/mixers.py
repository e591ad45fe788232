"""Layers that mix tokens without softmax attention: recurrences and short convolutions.

transformers gives such a layer's kernel as a function of the model's own module, such as
`torch_chunk_gated_delta_rule`. A module that calls one is a mixer. Its forward gets functions of
ours in their place; the model's code runs unchanged, and no other model is touched.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from attnmux.core import InvalidInput, LinearKind, LinearLayerSpec, current_forward_context
from attnmux.transformers.attention import NOT_ATTENTION

if TYPE_CHECKING:
    from collections.abc import Iterator

ACTIVATIONS = (None, "silu", "swish")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recurrence:
    """What a mixer asks for, in the contract's terms: see `LinearCall`."""

    kind: LinearKind
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    scaling: float
    qk_l2norm: bool


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Convolution:
    """The same for `ConvCall`."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool


class Runs(Protocol):
    """Whoever runs the calls of mixers."""

    def recur(self, mixer: Mixer, asked: Recurrence) -> torch.Tensor:
        """[T, Hv, V]"""

    def convolve(self, mixer: Mixer, asked: Convolution, index: int) -> torch.Tensor:
        """[T, C]; index: of the convolution among the layer's."""


@dataclass(kw_only=True, slots=True, eq=False)
class Mixer:
    """One module that calls a function of FUNCTIONS."""

    number: int
    """Its `LinearLayerSpec.layer_id`."""
    name: str
    """Of the module in the model."""
    module: torch.nn.Module
    runs: Runs | None = None
    spec: LinearLayerSpec | None = None
    """Known once it was recorded."""
    num_convs: int = 0
    """Convolutions of the running call so far."""

    def bind(self) -> None:
        """Give the module a forward that calls ours."""
        own = inspect.unwrap(type(self.module).forward)
        ours = {name: _bound(self, run) for name, run in FUNCTIONS.items() if _calls(own, name)}
        forward = FunctionType(
            own.__code__,
            {**own.__globals__, **ours},
            own.__name__,
            own.__defaults__,
            own.__closure__,
        )
        forward.__kwdefaults__ = own.__kwdefaults__

        def call(*args: object, **kwargs: object) -> object:
            self.num_convs = 0
            return forward(self.module, *args, **kwargs)

        self.module.forward = call  # an instance's own, which goes before its class's

    def recur(self, asked: Recurrence) -> torch.Tensor:
        return self._running().recur(self, asked)

    def convolve(self, asked: Convolution) -> torch.Tensor:
        index, self.num_convs = self.num_convs, self.num_convs + 1
        return self._running().convolve(self, asked, index)

    def _running(self) -> Runs:
        if self.runs is None:
            raise InvalidInput(self.name, got="a call of the model itself", expected="its runner's")
        return self.runs


def mixers_of(model: torch.nn.Module) -> tuple[Mixer, ...]:
    """The mixers of a model, in the model's order."""
    mixing = [pair for pair in model.named_modules() if _is_mixer(type(pair[1]))]
    return tuple(
        Mixer(number=number, name=name, module=module)
        for number, (name, module) in enumerate(mixing)
    )


def has_mixers(model_class: type[torch.nn.Module]) -> bool:
    """Whether a class beside the model's is one of mixers, as far as the code tells."""
    beside = vars(sys.modules[model_class.__module__]).values()
    classes = (one for one in beside if isinstance(one, type) and issubclass(one, torch.nn.Module))
    return any(map(_is_mixer, classes))


def _is_mixer(layer: type[torch.nn.Module]) -> bool:
    forward = inspect.unwrap(layer.forward)
    return any(_calls(forward, name) for name in FUNCTIONS)


def _calls(forward: object, name: str) -> bool:
    """Whether the function reads that name of its module."""
    code = getattr(forward, "__code__", None)
    return code is not None and name in code.co_names and name in forward.__globals__  # type: ignore[attr-defined]  # a function


def _bound(mixer: Mixer, run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> object:
        return run(mixer, *args, **kwargs)

    return call


def _convolve(
    mixer: Mixer,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """`causal_conv1d_fn`: x [1, C, T] to [1, C, T]."""
    _refuse(mixer, kwargs)
    if activation not in ACTIVATIONS:
        raise InvalidInput(f"{mixer.name}, activation", got=activation, expected="silu or none")
    rows = _row(mixer, x).t().contiguous()
    asked = Convolution(x=rows, weight=weight, bias=bias, silu=activation is not None)
    return mixer.convolve(asked).t().unsqueeze(0)


def _delta_rule(
    kind: LinearKind,
    mixer: Mixer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    output_final_state: bool = False,
    chunk_size: int = 0,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention`: q, k [1, T, Hk, K], v
    [1, T, Hv, V], to [1, T, Hv, V] and no final state. Both scale by the square root of K."""
    _refuse(mixer, kwargs)
    asked = Recurrence(
        kind=kind,
        q=_row(mixer, query),
        k=_row(mixer, key),
        v=_row(mixer, value),
        g=_row(mixer, g).float(),
        beta=_row(mixer, beta),
        scaling=query.shape[-1] ** -0.5,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )
    return mixer.recur(asked).unsqueeze(0), None


def _gated_delta_rule(mixer: Mixer, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:  # noqa: ANN401  # as _delta_rule
    return _delta_rule("gdn", mixer, *args, **kwargs)


def _kimi_delta_rule(mixer: Mixer, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:  # noqa: ANN401  # as _delta_rule
    return _delta_rule("kda", mixer, *args, **kwargs)


def _mamba2_scan(
    mixer: Mixer,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # transformers' names
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: object,
) -> torch.Tensor:
    """`mamba2_chunk_scan`: x [1, T, H, P], dt [1, T, H], A [H], B and C [1, T, G, N], to
    [1, T, H, P] float32."""
    _refuse(mixer, kwargs)
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    steps = _row(mixer, dt.clamp(min=dt_limit[0], max=dt_limit[1])).float()
    x = _row(mixer, hidden_states)
    asked = Recurrence(
        kind="mamba2",
        q=_row(mixer, C),
        k=_row(mixer, B),
        v=x,
        g=A.float() * steps,
        beta=steps,
        scaling=1.0,
        qk_l2norm=False,
    )
    out = mixer.recur(asked).float()
    if D is not None:
        out = out + D.unsqueeze(-1) * x.float()
    return out.unsqueeze(0)


def _selective_scan(
    mixer: Mixer,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # transformers' names
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    *,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **kwargs: object,
) -> torch.Tensor:
    """`mamba_selective_scan`: x, dt and z [1, I, T], A [I, N], B and C [1, N, T], to [1, I, T].

    The last three flags choose among ways to compute the same.
    """
    _refuse(mixer, kwargs)
    x, steps, keys, queries = (_row(mixer, each).t() for each in (hidden_states, dt, B, C))
    if delta_bias is not None:
        steps = steps + delta_bias.to(steps.dtype)
    if delta_softplus:
        steps = torch.nn.functional.softplus(steps)
    steps = steps.float()
    asked = Recurrence(
        kind="mamba1",
        q=queries.unsqueeze(1).contiguous(),
        k=keys.unsqueeze(1).contiguous(),
        v=x.unsqueeze(-1).contiguous(),
        g=steps.unsqueeze(-1) * A.float(),
        beta=steps,
        scaling=1.0,
        qk_l2norm=False,
    )
    out = mixer.recur(asked).squeeze(-1)
    if D is not None:
        out = out + x * D
    if z is not None:
        out = out * torch.nn.functional.silu(_row(mixer, z).t())
    return out.t().unsqueeze(0)


FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "causal_conv1d_fn": _convolve,
        "torch_chunk_gated_delta_rule": _gated_delta_rule,
        "chunk_kimi_delta_attention": _kimi_delta_rule,
        "mamba2_chunk_scan": _mamba2_scan,
        "mamba_selective_scan": _selective_scan,
    }
)
"""Functions of transformers' models, and ours. A model without a cache calls these in every step,
and never the ones for single tokens."""


def _row(mixer: Mixer, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.shape[0] != 1:
        got = f"{tensor.shape[0]} rows"
        raise InvalidInput(mixer.name, got=got, expected="the tokens of all requests in one row")
    return tensor[0]


def _refuse(mixer: Mixer, kwargs: Mapping[str, object]) -> None:
    """Raise InvalidInput for an argument that the contract does not know."""
    for name, value in kwargs.items():
        if value is not None and value is not False and name not in NOT_ATTENTION:
            expected = "nothing: linear layers through attnmux do not know this argument"
            raise InvalidInput(f"{mixer.name}, {name}", got=type(value).__name__, expected=expected)


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
        q, k = (_normed(each.float(), asked.qk_l2norm) for each in (asked.q, asked.k))
        met = asked.scaling * (q * k).sum(-1, keepdim=True).repeat_interleave(group, dim=1)
        return (met * asked.beta.unsqueeze(-1) * asked.v).to(asked.v.dtype)

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
        asked = self.recurrences.get(mixer.number)
        if len(sizes) > 1 or any(conv.x.dtype != dtype for conv in convs):
            got = f"convolutions of {sorted(sizes)} taps in {[conv.x.dtype for conv in convs]}"
            raise InvalidInput(mixer.name, got=got, expected=f"one number of taps, in {dtype}")
        if asked is None and not convs:
            raise InvalidInput(mixer.name, got="no call", expected="a layer that each step runs")
        shape = {} if asked is None else _shape(asked)
        return LinearLayerSpec(
            layer_id=mixer.number,
            kind="conv" if asked is None else asked.kind,
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
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) if normed else x


class OnBackend:
    """Runs mixers on the backends of the running step."""

    def recur(self, mixer: Mixer, asked: Recurrence) -> torch.Tensor:
        step, spec = current_forward_context(), _spec(mixer)
        backend = step.backend.linear(spec.kind)
        qkv = asked.q, asked.k, asked.v
        return backend.forward(*qkv, spec, step.batch, g=asked.g, beta=asked.beta)

    def convolve(self, mixer: Mixer, asked: Convolution, index: int) -> torch.Tensor:
        step, spec = current_forward_context(), _spec(mixer)
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


def serve(mixers: Sequence[Mixer]) -> tuple[LinearLayerSpec, ...]:
    """Let the mixers run on the step's backends from now on. Returns their layers."""
    for mixer in mixers:
        mixer.runs = OnBackend()
    return tuple(_spec(mixer) for mixer in mixers)
