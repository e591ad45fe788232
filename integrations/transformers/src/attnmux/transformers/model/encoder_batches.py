"""Several requests in one call of an encoder, each with the states that it gets alone.

Inputs of one shape are rows of a batch. Texts of other lengths are padded if the encoder's
layers all hand their attention to transformers' interface, which hides padding from every query;
other encoders look at the length of the row (BigBird's blocks) or at its neighbours.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from attnmux.core import AttnmuxError, InvalidInput
from attnmux.transformers.model.encoder_decoder_attention import decoder_forward, encoder_mask
from attnmux.transformers.model.probe import Recorder, are_alike, recording

Inputs = Mapping[str, torch.Tensor]

MOST_TOKENS = 4096
"""Tokens of the texts of one call, padding included. A longer text runs alone."""

MOST_ROWS = 8
"""Requests of one call that are not texts."""

PROBED = 5, 9
"""Tokens of the texts that show whether padding changes them."""


class BatchedEncoder:
    """The encoder of an encoder-decoder model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._name = type(model).__name__
        self._encoder: Any = model.get_encoder()
        self._config: Any = getattr(self._encoder, "config", model.config)

    def states(self, inputs: Sequence[Inputs]) -> list[torch.Tensor]:
        """States of each request, [E, width]. inputs: as in `PackedDecoder.encode`.

        Raises InvalidInput for other inputs.
        """
        checked = [self._checked(source) for source in inputs]
        states: list[torch.Tensor] = [torch.empty(0)] * len(checked)
        for group in self._groups(checked):
            rows = self._run([checked[index] for index in group])
            for index, row in zip(group, rows, strict=True):
                states[index] = row
        return states

    def _checked(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """On the model's device and in its dtype, without a mask that hides nothing."""
        tensors = {name: value.to(self._model.device) for name, value in inputs.items()}
        mask = tensors.pop("attention_mask", None)
        if mask is not None and not bool(mask.all()):
            raise InvalidInput(
                "encoder", got="an attention_mask with padding", expected="inputs without any"
            )
        for name, value in tensors.items():
            if name not in self._taken or value.shape[:1] != (1,):
                raise InvalidInput(
                    "encoder",
                    got=f"{name} of shape {tuple(value.shape)}",
                    expected=f"some of {', '.join(self._taken)}, each of one request: [1, …]",
                )
            if value.is_floating_point():
                tensors[name] = value.to(self._model.dtype)
        if not tensors:
            raise InvalidInput("encoder", got="nothing", expected="the encoder's inputs")
        return tensors

    @cached_property
    def _taken(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self._encoder.forward).parameters

    def _groups(self, given: Sequence[Inputs]) -> Iterator[list[int]]:
        """The requests of each call."""
        by_shape: dict[tuple[object, ...], list[int]] = {}
        for index, each in enumerate(given):
            is_text = set(each) == {"input_ids"}
            padded = is_text and len(given) > 1 and self.pads_texts
            shapes = tuple((name, value.shape, value.dtype) for name, value in each.items())
            by_shape.setdefault(("text",) if padded else shapes, []).append(index)
        for alike in by_shape.values():
            if set(given[alike[0]]) != {"input_ids"}:
                yield from (alike[at : at + MOST_ROWS] for at in range(0, len(alike), MOST_ROWS))
            else:
                yield from _fitting(alike, [_length(source) for source in given])

    def _run(self, given: Sequence[Inputs]) -> list[torch.Tensor]:
        """Texts, or inputs of one shape, in one call."""
        lens = [_length(source) for source in given] if "input_ids" in given[0] else []
        if len(set(lens)) > 1:
            batch = self._padded([source["input_ids"] for source in given], max(lens))
        else:
            lens = []
            batch = {name: torch.cat([source[name] for source in given]) for name in given[0]}
        try:
            states = self._encoder(**batch).last_hidden_state
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError, TypeError, IndexError) as error:
            # Encoders raise these for sound of another length or shape than they take
            raise InvalidInput(
                "encoder",
                got=AttnmuxError.in_brief(error),
                expected=f"inputs that {self._name} can read",
            ) from error
        rows = states.unbind(0)
        return [row[:length] for row, length in zip(rows, lens, strict=True)] if lens else [*rows]

    def _padded(self, texts: Sequence[torch.Tensor], longest: int) -> dict[str, torch.Tensor]:
        """texts: [1, E] each."""
        padding = getattr(self._config, "pad_token_id", None) or 0
        ids = texts[0].new_full((len(texts), longest), padding)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : text.shape[1]] = text[0]
            mask[row, : text.shape[1]] = 1
        return {"input_ids": ids, "attention_mask": mask}

    @cached_property
    @torch.inference_mode()
    def pads_texts(self) -> bool:
        """Whether a text that is padded has the states that it has alone, whatever its length."""
        if not {"input_ids", "attention_mask"} <= self._taken.keys():
            return False
        texts = [torch.arange(3, 3 + n, device=self._model.device)[None] for n in PROBED]
        alone = [self._run([{"input_ids": text}])[0] for text in texts]
        noted = _Callers()
        with recording(self._model, noted):
            together = self._run([{"input_ids": text} for text in texts])
        layers = getattr(self._config.get_text_config(), "num_hidden_layers", None)
        return len(noted.callers) == layers and all(map(are_alike, together, alone))


def check_inputs(inputs: object) -> None:
    """Raise InvalidInput for inputs of an encoder that are not tensors by their names, and for ids
    of tokens that are not [1, E]."""
    expected = "tensors [1, …] by the names of the encoder's arguments"
    if not isinstance(inputs, Mapping):
        raise InvalidInput("encoder", got=f"a {type(inputs).__name__}", expected=expected)
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            got = f"a {type(value).__name__} as {name}"
            raise InvalidInput("encoder", got=got, expected=expected)
        if name == "input_ids" and (value.ndim != 2 or value.is_floating_point()):
            got = f"input_ids {list(value.shape)} in {value.dtype}"
            raise InvalidInput("encoder", got=got, expected="int64 [1, E]")


def _length(inputs: Inputs) -> int:
    return inputs["input_ids"].shape[1] if "input_ids" in inputs else 0


def _fitting(indices: Sequence[int], lens: Sequence[int]) -> Iterator[list[int]]:
    """Groups of texts of about the same length, within `MOST_TOKENS`."""
    group: list[int] = []
    for index in sorted(indices, key=lambda one: lens[one]):
        if group and lens[index] * (len(group) + 1) > MOST_TOKENS:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


@dataclass(kw_only=True, slots=True)
class _Callers(Recorder):
    """Notes the encoder's modules that call transformers' interface, which then runs as usual."""

    def attention(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        self.callers.append(module)
        return decoder_forward(module, *args, **kwargs)

    def mask(self, **kwargs: Any) -> Any:  # noqa: ANN401
        return encoder_mask(**kwargs)
