"""Calls a model on a prepared step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from attnmux.core import ForwardBatch
from attnmux.transformers.requests.sequence import Step
from attnmux.transformers.run.served_model import ServedModel


class ModelCall:
    """A model as a function of a step's inputs."""

    def __init__(self, model: ServedModel) -> None:
        self.module: Any = model.module
        self._reads_images = model.images is not None
        self._chunks = model.chunks
        self._keeps_logits = "logits_to_keep" in inspect.signature(self.module.forward).parameters
        self.is_compiled = False
        """Whether the model's layers run as compiled code."""

    def inputs(self, step: Step) -> dict[str, torch.Tensor]:
        """What the model takes in a step, besides what the batch has."""
        inputs = {"input_ids": step.input_ids}
        if step.encoder_states is not None:
            inputs["encoder_states"] = step.encoder_states
        if step.features is not None:
            inputs["features"] = step.features
        if self._reads_images:
            inputs.update(self._image_inputs(step))
        return inputs

    def _image_inputs(self, step: Step) -> dict[str, torch.Tensor]:
        """What the model takes besides or instead of the tokens' ids and places."""
        positions = step.batch.positions if step.position_ids is None else step.position_ids
        inputs = {"position_ids": positions}
        if step.images is not None:
            # Some models have no embedding of a placeholder
            ids = step.input_ids.index_fill(0, step.images.indices, 0)
            embeds: torch.Tensor = self.module.get_input_embeddings()(ids)
            rows = step.images.embeds.to(embeds.dtype)
            inputs["inputs_embeds"] = embeds.index_copy(0, step.images.indices, rows)
        return inputs

    def logits(
        self, batch: ForwardBatch, inputs: Mapping[str, torch.Tensor], keep: torch.Tensor | None
    ) -> torch.Tensor:
        """As `ModelRunner.logits`."""
        keeps = {"logits_to_keep": keep} if keep is not None and self._keeps_logits else {}
        given = dict(inputs)
        positions = given.pop("position_ids", batch.positions)
        if self._chunks is not None:
            positions = self._chunks.places(positions)
        # A compiler makes other code for tensors that begin elsewhere in their memory.
        positions = positions.clone() if self.is_compiled else positions
        tokens = "input_ids"
        if "inputs_embeds" in given:
            tokens = "inputs_embeds"
            del given["input_ids"]
        given[tokens] = given[tokens].unsqueeze(0)
        logits = self.module(
            position_ids=positions.unsqueeze(-2),
            use_cache=False,
            **given,
            **keeps,
        ).logits[0]
        if keep is not None and not keeps:
            logits = logits[keep]
        assert isinstance(logits, torch.Tensor)
        return logits
