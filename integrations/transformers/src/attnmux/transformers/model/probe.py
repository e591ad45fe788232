"""Runs a model once to record its attention calls and its masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from attnmux.core import AttnmuxError, InvalidInput
from attnmux.transformers.model.attention import no_mask, set_attention
from attnmux.transformers.model.layer_call import LayerCall, read_call
from attnmux.transformers.model.mixers.mixer import Mixer
from attnmux.transformers.model.mixers.mixers import MixerRecorder
from attnmux.transformers.model.mixers.mixers import recording as recording_mixers
from attnmux.transformers.model.reach import MaskFunction, Reach, read_reach

TOLERANCE = 0.02
"""The difference of two results that is tolerated, as a share of the largest value: far above
rounding in any dtype, and far below the effect of a token, a place or another order of heads."""


def are_alike(result: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results of a model's own code differ by rounding alone."""
    return float((result - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


@dataclass(kw_only=True, slots=True)
class Recorder:
    """Attention and mask function of one probe.

    A tensor [1, 1, 1, 1] with the number of a mask replaces it, so that each layer shows which mask
    it was given. Attention of a sequence's first token is its own V, so that the result here is
    right except for sinks.
    """

    calls: list[LayerCall] = field(default_factory=list)
    callers: list[torch.nn.Module] = field(default_factory=list)
    """The module of each call."""
    masks: list[MaskFunction] = field(default_factory=list)
    mixers: MixerRecorder = field(default_factory=MixerRecorder)
    reaches: dict[tuple[int, Reach], Reach] = field(default_factory=dict)
    """The reaches of the masks, many of which are shared by layers."""

    def attention(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        call = self.read(read_call(module, query, key, value, attention_mask, **kwargs))  # type: ignore[arg-type]  # checked there
        self.calls.append(call)
        self.callers.append(module)
        group = call.q.shape[1] // call.v.shape[1]
        return call.v.repeat_interleave(group, dim=1).unsqueeze(0), None

    def read(self, call: LayerCall) -> LayerCall:
        """The call to keep, with a V of as many dims as the layer's output."""
        return call

    def mask(
        self, *, mask_function: MaskFunction, device: torch.device, **kwargs: object
    ) -> torch.Tensor:
        """Accepts the attention_mask of ones that some decoders make themselves.

        They make none while they run: `SERVED` has no mask function.
        """
        mask = kwargs.pop("attention_mask", None)
        if isinstance(mask, torch.Tensor) and not bool(mask.all()):
            raise InvalidInput("attention_mask", got="padding", expected="ones: nothing is padded")
        no_mask(**kwargs)  # type: ignore[arg-type]  # checked there
        self.masks.append(mask_function)
        # Of floats, as transformers' own for eager attention
        return torch.full((1, 1, 1, 1), float(len(self.masks) - 1), device=device)

    def of_tokens(self, call: LayerCall) -> tuple[torch.Tensor, ...]:
        """The parts of a call that depend on the positions of its new tokens."""
        return call.q, call.k

    def reach_of(self, call: LayerCall, max_context_len: int) -> Reach:
        """The reach of the layer of `call`, by its window and its mask."""
        stated = Reach(sliding_window_size=call.sliding_window_size)
        if call.mask is None:
            return stated
        value = float(call.mask) if call.mask.numel() == 1 else -1.0
        number = int(value)
        if value != number or not 0 <= number < len(self.masks):
            raise InvalidInput(
                f"layer {call.layer_id}",
                got=f"a mask that the layer made itself, of shape {tuple(call.mask.shape)}",
                expected="a mask from transformers' mask functions, unchanged",
            )
        if (number, stated) not in self.reaches:
            self.reaches[number, stated] = read_reach(
                self.masks[number], stated, max_context_len=max_context_len, device=call.q.device
            )
        return self.reaches[number, stated]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A model under a probe."""

    model: PreTrainedModel
    """The model whose attention implementation is switched."""
    call: Callable[..., Any]
    """Takes input_ids, position_ids and use_cache. Its result has logits."""
    embeddings: torch.nn.Module
    """The input embedding."""
    recorder: Callable[[], Recorder] = Recorder
    mixers: Sequence[Mixer] = ()
    inputs: str = "input_ids and position_ids alone"
    """The inputs that the model must run on."""

    @classmethod
    def of(cls, model: PreTrainedModel, mixers: Sequence[Mixer] = ()) -> Probe:
        """The probed model of a decoder model, with its bound mixers."""
        embeddings = model.get_input_embeddings()
        return cls(model=model, call=model, embeddings=embeddings, mixers=mixers)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def token(self) -> int:
        """A token id that is no padding, which some models do not count."""
        text = self.model.config.get_text_config(decoder=True)
        return int(getattr(text, "pad_token_id", None) == 0)

    def run(
        self, token_ids: list[int], position_ids: list[int] | None
    ) -> tuple[torch.Tensor, Recorder]:
        """The logits [T, vocabulary] and the recorder. position_ids: None takes the model's own.

        The logits only show whether they are numbers: see `Recorder`. Raises InvalidInput for a
        model whose own code fails.
        """
        device, recorder = self.model.device, self.recorder()
        positions = None if position_ids is None else torch.tensor([position_ids], device=device)
        with recording(self.model, recorder), recording_mixers(self.mixers) as recorder.mixers:
            try:
                logits = self.call(
                    input_ids=torch.tensor([token_ids], device=device),
                    position_ids=positions,
                    use_cache=False,
                ).logits
            except (AttnmuxError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # the model's code may raise anything
                raise InvalidInput(
                    self.name,
                    got=f"{type(error).__name__}: {error}",
                    expected=f"a model that runs on {self.inputs}, and passes masks to attention "
                    "as transformers made them",
                ) from error
        return logits[0], recorder


@contextmanager
def recording(model: PreTrainedModel, recorder: Recorder) -> Iterator[None]:
    """Switch the model to the recorder, under a name that no other probe uses."""
    name = f"attnmux_probe_{id(recorder)}"
    before = model.config._attn_implementation
    AttentionInterface.register(name, recorder.attention)
    AttentionMaskInterface.register(name, recorder.mask)
    try:
        set_attention(model, name)
        yield
    finally:
        set_attention(model, before)
        AttentionInterface._global_mapping.pop(name)  # there is no public way to unregister
        AttentionMaskInterface._global_mapping.pop(name)
