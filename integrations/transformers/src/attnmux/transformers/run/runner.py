"""A model on its backend: pools, steps and logits, graphs and compilation."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from attnmux.core import (
    CapturingRanks,
    DeviceGraphs,
    ForwardMode,
    GraphConfig,
    GraphRunner,
    InvalidInput,
    ModelInput,
)
from attnmux.transformers.model.encoder_batches import check_inputs
from attnmux.transformers.model.images.capture import ImageReader
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.requests.prompt_images import PromptImages
from attnmux.transformers.requests.sequence import check_encoder_len
from attnmux.transformers.requests.text import check_prompt
from attnmux.transformers.run.model_on_backend import ModelOnBackend
from attnmux.transformers.run.pieces import make_pieces


class ModelRunner(ModelOnBackend):
    """Runs steps of a model, in compiled code and graphs if these are made, and reads the requests'
    other inputs, such as images."""

    def compile(self, backend: str = "inductor") -> None:
        """Compile the model's layers, and run a few steps so that their code is made now.

        Call it before `capture_graphs`: graphs then hold the compiled code. Earlier graphs are
        dropped, since weights move. backend: as `torch.compile` takes it.
        Raises InvalidInput for an encoder-decoder model and one without a list of layers, and
        whatever the compiler raises; the layers then run as before.
        """
        self.graphs = self.verify_graphs = self.catch_up_graphs = self.pieces = None
        # By name: the import loads a compiler, which takes seconds.
        pkgutil.resolve_name("attnmux.transformers.run.compiled:compile_model")(self, backend)

    def capture_graphs(
        self,
        *,
        batch_sizes: Sequence[int] | None = None,
        draft_tokens: int | None = None,
        draft_topk: int = 1,
        pads: bool = True,
        devices: DeviceGraphs | None = None,
    ) -> None:
        """Capture decode steps, and with drafts those that verify them. Later steps replay them.

        batch_sizes: None takes the usual ones of each. pads: as `GraphConfig.pads`. draft_tokens,
        draft_topk: as in `RunnerOptions`. devices: None takes those of the model's device.
        Raises GraphUnsupported if the device or the backend has no graphs, or if the model does
        something that a graph cannot hold. Steps without graphs stay eager; if only the steps that
        verify cannot be captured, decode steps have theirs.
        """
        devices = devices or DeviceGraphs.of(self.context.device)
        rows, encoder = self.context.max_batch_size, self.steps.max_encoder_len > 0
        config = GraphConfig(
            batch_sizes=GraphConfig.sizes(pool_size=rows, chosen=batch_sizes),
            encoder=encoder,
            host_lens=True,
        )
        self.graphs = self._captured(replace(config, pads=pads), devices)
        if draft_tokens is not None:
            config = GraphConfig(
                batch_sizes=GraphConfig.sizes(pool_size=rows, chosen=batch_sizes, speculation=True),
                forward_mode=ForwardMode.TARGET_VERIFY,
                tokens_per_request=draft_tokens,
                spec_topk=draft_topk,
                visible=draft_topk > 1,
                host_lens=True,
            )
            self.verify_graphs = self._captured(replace(config, pads=pads), devices)

    def capture_pieces(
        self, *, sizes: Sequence[int] | None = None, devices: DeviceGraphs | None = None
    ) -> None:
        """Capture steps over prompts in pieces from one attention call to the next. Later steps of
        up to so many tokens, mixed ones too, replay them.

        sizes: numbers of tokens, ascending, all captured now; None: the largest of the usual ones
        now, and each other one after sixteen steps that need it. devices: as in `capture_graphs`.
        Raises as `capture_graphs` does, and GraphUnsupported for a model of ranks, with an encoder,
        or with parts that read the running step.
        """
        self.pieces = None
        self.pieces = make_pieces(
            self.served,
            self.backend,
            self.logits,
            sizes=sizes,
            devices=devices,
            num_ranks=self.ranks.size,
        )

    def capture_catch_up(
        self, num_tokens: int, *, batch_sizes: Sequence[int], devices: DeviceGraphs
    ) -> None:
        """Capture DRAFT_EXTEND steps with `num_tokens` new tokens for each request.

        batch_sizes: ascending. Raises as `capture_graphs` does.
        """
        self.catch_up_graphs = None
        config = GraphConfig(
            batch_sizes=tuple(batch_sizes),
            forward_mode=ForwardMode.DRAFT_EXTEND,
            tokens_per_request=num_tokens,
            host_lens=True,
        )
        self.catch_up_graphs = self._captured(config, devices)

    def _captured(self, config: GraphConfig, devices: DeviceGraphs) -> GraphRunner:
        inputs = {"input_ids": ModelInput(dtype=torch.int64)}
        if self.served.head is not None and self.steps.hidden is not None:
            states = self.steps.hidden.states
            inputs["features"] = ModelInput(dtype=states.dtype, trailing=states.shape[1:])
        for part in self.served.parts:
            config = part.captured(config)
            inputs.update(part.graph_inputs())

        def make(ranks: CapturingRanks) -> GraphRunner:
            return GraphRunner(
                self.backend, self.logits, config, devices=devices, inputs=inputs, ranks=ranks
            )

        return self.ranks.steps.capture(make)

    def encode(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`SequenceState.encoder_states` of a request. Raises as `encode_all` does."""
        return self.encode_all([inputs])[0]

    def encode_all(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """`SequenceState.encoder_states` of each request: see `PackedDecoder.encode`.

        Raises InvalidInput for a decoder-only model, and for more tokens than fit.
        """
        if not isinstance(self.model, PackedDecoder):
            raise InvalidInput(
                "encoder", got="inputs for an encoder", expected="none: the model has none"
            )
        longest = self.steps.max_encoder_len
        for tensor in inputs:
            check_inputs(tensor)
            if "input_ids" in tensor:
                ids = tensor["input_ids"].flatten().tolist()
                check_prompt("encoder input_ids", ids, self.model.encoder_vocabulary, longest)
        states = self.model.encode(inputs)
        for rows in states:
            check_encoder_len(rows.shape[0], longest)
        return states

    def read_images(self, inputs: Mapping[str, Any]) -> PromptImages:
        """The images of one prompt, for `Engine.add`: see `ImageReader.read`.

        inputs: the processor's result for a text and its images, in torch tensors. Every rank calls
        it, with the same inputs. Raises InvalidInput for a runner that was not made for images, and
        as `ImageReader.read`; RanksDiffer for other images on one rank.
        """
        images = self.part(ImageReader)
        if images is None:
            expected = "none: the runner was made without images=True"
            raise InvalidInput("images", got="some", expected=expected)
        return self.ranks.requests.read_images(lambda: images.read(inputs))
