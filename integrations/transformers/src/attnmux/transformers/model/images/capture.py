"""The inputs of a model's decoder for a prompt with images, captured from the model itself.

The model runs up to its decoder, which a hook stops. Nothing is known about any model by its name:
embeddings, positions and masks are those that the model made.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionMaskInterface, PreTrainedModel

from attnmux.core import (
    AttnmuxError,
    BackendContext,
    Decision,
    InvalidInput,
    LayerSpec,
    ModelInput,
    Request,
)
from attnmux.transformers.model.images.encoder import VisionTower
from attnmux.transformers.model.part import ModelPart
from attnmux.transformers.model.reach import MaskFunction, Reach, read_spans
from attnmux.transformers.options import RunnerOptions
from attnmux.transformers.requests.prompt_images import PromptImages, keys_of
from attnmux.transformers.requests.sequence import Step

TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Results of a processor that are no inputs of the vision tower."""

TYPES = ("token_type_ids", "mm_token_type_ids")
"""Names under which models take the kind of each token: 0 text, 1 image."""

IGNORED = frozenset({"use_cache", "return_dict", "input_ids", "logits_to_keep"})
"""Arguments of a decoder on which its result does not depend, or that are None here."""


class _Stopped(Exception):
    """The decoder was called."""


@dataclass(kw_only=True, slots=True)
class _Handed:
    """The decoder's captured arguments."""

    inputs: dict[str, Any] = field(default_factory=dict)
    masks: list[MaskFunction] = field(default_factory=list)

    def mask(self, *, mask_function: MaskFunction, **_: object) -> torch.Tensor:
        """A mask function of transformers that notes what it was asked for."""
        self.masks.append(mask_function)
        return torch.full((1, 1, 1, 1), len(self.masks) - 1)

    def stop(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inputs = kwargs
        raise _Stopped


class ImageReader(ModelPart):
    """Reads the images of prompts with a model."""

    unpieced = "images among its inputs"

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises InvalidInput for a model that cannot serve images."""
        self.tower = VisionTower(model)
        self._model = model
        self._name = type(model).__name__
        self._decoder: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]  # transformers' own
        self._reaches: set[Reach] = set()
        token_id = getattr(model.config, "image_token_id", None)
        if not isinstance(token_id, int):
            raise InvalidInput(
                "images", got=f"{self._name} without an image_token_id", expected="a placeholder"
            )
        self.token_id = token_id
        """Token id of the placeholders."""
        table: Any = model.get_input_embeddings()
        self._embeddings = table
        self.width = int(table.weight.shape[1])
        """Width of the input embeddings."""
        self.has_spans = False
        """Whether tokens of an image see each other, which needs custom masks."""

    @classmethod
    def find(cls, model: PreTrainedModel, options: RunnerOptions) -> ImageReader | None:
        return cls(model) if options.images else None

    def mark(self, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
        self._reaches = {
            Reach(layer.sliding_window_size, layer.attention_chunk_size) for layer in layers
        }
        # A window pool might have too little room for tokens that run in one step
        self.has_spans = self.one_pool = bool(self._probe_spans())
        return tuple(layers)

    def ask(self, ways: Sequence[Request], options: RunnerOptions) -> list[Request]:
        needs = {"encoder_head_dim": self.tower.layer.qk_head_dim, "custom_mask": self.has_spans}
        return [way.replace(origin="model", **needs) for way in ways]

    def attach(self, context: BackendContext, decision: Decision) -> None:
        self.tower.build(decision, context.device)

    def graph_inputs(self) -> Mapping[str, ModelInput]:
        return {"position_ids": ModelInput(dtype=torch.int64)}

    def inputs(self, step: Step) -> Mapping[str, torch.Tensor]:
        """The model's arguments in addition to or instead of the tokens' ids and places."""
        positions = step.batch.positions if step.position_ids is None else step.position_ids
        inputs = {"position_ids": positions}
        if step.images is not None:
            # Some models have no embedding of a placeholder
            ids = step.input_ids.index_fill(0, step.images.indices, 0)
            embeds: torch.Tensor = self._embeddings(ids)
            rows = step.images.embeds.to(embeds.dtype)
            inputs["inputs_embeds"] = embeds.index_copy(0, step.images.indices, rows)
        return inputs

    def _probe_spans(self) -> list[tuple[int, int]]:
        """The spans of a prompt without pixels that claims to hold an image."""
        types = torch.tensor([[0, 1, 1, 1, 0]], device=self._model.device)
        taken = inspect.signature(self._model.forward).parameters
        token_types = {name: types for name in TYPES if name in taken}
        handed = self._run({"input_ids": torch.zeros_like(types), **token_types})
        return self._spans(handed, types.shape[1])

    @torch.inference_mode(False)
    @torch.no_grad()
    def read(self, inputs: Mapping[str, Any]) -> PromptImages:
        """The images of one prompt, as the model's processor returns it in torch tensors.

        Raises InvalidInput for a batch, for padding, for positions of the caller's own, for images
        that do not match the placeholders, and for a model whose decoder takes more than
        embeddings, positions and spans.
        """
        tensors = self._given(inputs)
        ids = [int(token) for token in tensors["input_ids"][0].tolist()]
        places = [place for place, token in enumerate(ids) if token == self.token_id]
        seen = {name: value for name, value in tensors.items() if name not in TOKEN_INPUTS}
        pixels = [name for name, value in seen.items() if value.is_floating_point()]
        for name in pixels:
            tensors[name] = seen[name].to(self._model.dtype)
        if not places or not pixels:
            raise InvalidInput(
                "images",
                got=f"{len(places)} placeholders, and {', '.join(pixels) or 'no pixels'}",
                expected="a prompt with a placeholder for each of its images",
            )
        del tensors["attention_mask"]
        calls = self.tower.num_calls
        handed = self._run(tensors)
        if self.tower.num_calls == calls:
            raise InvalidInput(
                "images",
                got=f"{self._name}, whose vision tower computes attention by itself",
                expected="one that calls transformers' AttentionInterface",
            )
        spans = self._spans(handed, len(ids))
        if spans and not self.has_spans:
            raise InvalidInput(
                self._name,
                got="an image whose tokens see each other",
                expected="causal attention, as in the model's probe",
            )
        positions = self._positions(handed, len(ids))
        return PromptImages(
            token_ids=tuple(ids),
            places=torch.tensor(places),
            embeds=self._embeds(handed, ids, places),
            keys=keys_of(ids, places, seen, positions=positions, spans=spans),
            positions=positions,
            delta=0 if positions is None else int(positions.max()) + 1 - len(ids),
            spans=tuple(spans),
        )

    def _given(self, inputs: object) -> dict[str, torch.Tensor]:
        """The tensors, on the model's device, with an attention_mask that hides nothing."""
        mapping: Mapping[str, object] = inputs if isinstance(inputs, Mapping) else {}
        tensors = {
            name: value.to(self._model.device)
            for name, value in mapping.items()
            if isinstance(value, torch.Tensor)
        }
        ids = tensors.get("input_ids")
        mask = tensors.setdefault("attention_mask", torch.ones(1))
        got = f"no input_ids in a {type(inputs).__name__}"
        if ids is not None:
            got = f"input_ids {tuple(ids.shape)} in {ids.dtype}, or padding"
            is_prompt = ids.ndim == 2 and len(ids) == 1 and not ids.is_floating_point()
            # Prefixes are shared by ids and images alone
            faults = [
                f"{name} too" for name in ("position_ids", "inputs_embeds") if name in tensors
            ]
            faults += [
                f"{name} {tuple(tensors[name].shape)} for input_ids {tuple(ids.shape)}"
                for name in TYPES
                if name in tensors and tensors[name].shape != ids.shape
            ]
            if is_prompt and bool(mask.all()) and not faults:
                return tensors
            got = ", ".join(faults) or got
        raise InvalidInput(
            "images",
            got=got,
            expected="the processor's result for one prompt in torch tensors: input_ids [1, P]",
        )

    def _run(self, given: Mapping[str, torch.Tensor]) -> _Handed:
        handed = _Handed()
        hook = self._decoder.register_forward_pre_hook(handed.stop, with_kwargs=True)
        try:
            with _noting_masks(self._model, self._decoder, handed):
                self._model(**given, use_cache=False)
        except _Stopped:
            pass
        except (torch.OutOfMemoryError, AttnmuxError):
            raise
        except Exception as error:  # each model has errors of its own
            raise InvalidInput(
                "images",
                got=AttnmuxError.in_brief(error),
                expected=f"images that {self._name} reads, one for each placeholder",
            ) from error
        finally:
            hook.remove()
        self._check_known(handed)
        return handed

    def _check_known(self, handed: _Handed) -> None:
        """Refuse what the steps of a request would not hand to the decoder."""
        known = {"inputs_embeds", "position_ids", "attention_mask", *IGNORED}
        more = [
            name
            for name, value in handed.inputs.items()
            if name not in known and value is not None and value is not False
        ]
        mask = handed.inputs.get("attention_mask")
        masks = list(mask.values()) if isinstance(mask, dict) else [mask]
        unknown_masks = [
            shown for shown in masks if shown is not None and shown.shape != (1, 1, 1, 1)
        ]
        if more or unknown_masks or handed.inputs.get("inputs_embeds") is None:
            raise InvalidInput(
                "images",
                got=f"{self._name}, whose decoder takes {more or 'a mask of its own'}",
                expected="a decoder that takes embeddings, positions and transformers' masks",
            )

    def _embeds(self, handed: _Handed, ids: Sequence[int], places: Sequence[int]) -> torch.Tensor:
        """[N, width] of the placeholders. Refuses a model that changes other embeddings."""
        embeds: torch.Tensor = handed.inputs["inputs_embeds"][0]
        is_text = torch.ones(len(ids), dtype=torch.bool)
        is_text[places] = False
        text = torch.tensor(ids)[is_text].to(embeds.device)
        if not torch.equal(self._embeddings(text), embeds[is_text.to(embeds.device)]):
            raise InvalidInput(
                "images",
                got=f"{self._name}, in which images change the embeddings of text",
                expected="embeddings only in the places of the placeholders",
            )
        return embeds[torch.tensor(places, device=embeds.device)].clone()

    def _positions(self, handed: _Handed, length: int) -> torch.Tensor | None:
        """[3, P] on the host; None if positions are places."""
        positions = handed.inputs.get("position_ids")
        if positions is None:
            return None
        rows: torch.Tensor = positions.reshape(-1, length).cpu()
        if torch.equal(rows, torch.arange(length).expand_as(rows)):
            return None
        if rows.shape[0] == 3 and bool((rows[:, -1] == rows.max()).all()):
            return rows
        raise InvalidInput(
            "images",
            got=f"positions {tuple(positions.shape)}, and an image or a smaller one at the end",
            expected="positions [3, 1, P], whose last token is text",
        )

    def _spans(self, handed: _Handed, length: int) -> list[tuple[int, int]]:
        """The parts whose tokens see each other. Refuses masks that show anything else."""
        device = self._model.device
        spans = read_spans(handed.masks, self._reaches, length, device)
        if spans is None:
            raise InvalidInput(
                "images",
                got=f"a mask of {self._name} for {length} tokens",
                expected="causal attention with the layers' windows, in which parts may see "
                "themselves",
            )
        return spans


@contextmanager
def _noting_masks(
    model: PreTrainedModel, decoder: torch.nn.Module, handed: _Handed
) -> Iterator[None]:
    """Have the model ask `handed` for the decoder's masks, under a name that no other call uses."""
    name = f"attnmux_images_{id(handed)}"
    configs: list[Any] = [decoder.config, model.config.get_text_config()]
    before = [config._attn_implementation for config in configs]
    AttentionMaskInterface.register(name, handed.mask)
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
        AttentionMaskInterface._global_mapping.pop(name)  # there is no public way to unregister
