"""An encoder-decoder model, called as a decoder model is: its encoder runs once a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

from attnmux.core import InvalidInput
from attnmux.transformers.model.encoder_batches import BatchedEncoder
from attnmux.transformers.model.positions import PositionTable, takes

STAND_IN = 4
"""The number of zero encoder states in a step without a new encoder. A decoder layer without any
would skip cross-attention. Their K and V are not used. No probe has as many tokens, so that the
number of keys identifies cross-attention."""


@dataclass
class EncoderOutput(BaseModelOutput):
    """An encoder's states, with what some decoders read besides them: nothing is padded."""

    attention_mask: torch.Tensor | None = None
    router_logits: None = None


class PackedDecoder(torch.nn.Module):
    """An encoder-decoder model with the interface of a decoder model: tokens packed into one
    row."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self._encoder = BatchedEncoder(model)
        self.generation_config = model.generation_config
        decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]  # transformers' own
        self._hands_positions_down = takes(model, "decoder_position_ids")
        self._positions: torch.Tensor | None = None
        """Positions of the running call, for a decoder that `takes_positions`."""
        tables = [
            each
            for name, each in decoder.named_modules()
            if name.split(".")[-1] == "embed_positions"
        ]
        self.joins_attention = False
        """Whether a call of attention goes to two layers, whose results are joined by LSE. Known
        once it was recorded."""
        self.takes_positions = False
        """Whether the decoder is given positions itself, which its model does not hand down."""
        self._table: PositionTable | None = None
        if tables:
            self._table = PositionTable(type(model).__name__, tables[0])
        elif takes(decoder, "position_ids") and not self._hands_positions_down:
            self.takes_positions = True
            decoder.register_forward_pre_hook(self._with_positions, with_kwargs=True)

    def count_to(self, max_context_len: int) -> None:
        """Serve so many positions of a decoder that counts its tokens by itself."""
        if self._table is not None:
            self._table.length = max_context_len

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def width(self) -> int:
        """Dims of an encoder state, before any projection for the decoder."""
        projection = getattr(self.model, "enc_to_dec_proj", None)
        if isinstance(projection, torch.nn.Linear):
            return projection.in_features
        return int(self.config.get_text_config(decoder=True).hidden_size)

    @property
    def encoder_vocabulary(self) -> int:
        """The number of tokens that the encoder knows."""
        table = embeddings_of(self.model.get_encoder()).weight
        assert isinstance(table, torch.Tensor)
        return table.shape[0]

    @torch.inference_mode()
    def encode(self, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[torch.Tensor]:
        """The encoder's states of each request, [E, width], from as few calls as `BatchedEncoder`
        makes.

        inputs: the encoder's arguments for each, with a batch dimension of 1 and without padding:
        `input_ids` [1, E], or `input_features` as the model's feature extractor makes them.
        Raises InvalidInput for other inputs.
        """
        return self._encoder.states(inputs)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        encoder_states: torch.Tensor | None = None,
        use_cache: bool = False,
    ) -> Seq2SeqLMOutput:
        """The model's output, with logits, for tokens [1, T] at positions [1, T].

        encoder_states: [E, width] of the requests whose encoder is new, one after another.
        position_ids: None takes the model's own count.
        """
        if encoder_states is None:
            shape = (STAND_IN, self.width)
            encoder_states = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        places = {"decoder_position_ids": position_ids} if self._hands_positions_down else {}
        self._positions = position_ids
        with nullcontext() if self._table is None else self._table.given(position_ids):
            output: Seq2SeqLMOutput = self.model(
                decoder_input_ids=input_ids,
                encoder_outputs=EncoderOutput(
                    last_hidden_state=encoder_states.unsqueeze(0)  # type: ignore[arg-type]  # typed as FloatTensor
                ),
                use_cache=use_cache,
                **places,
            )
            return output

    def _with_positions(self, _: object, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        return args, {**kwargs, "position_ids": self._positions}


def embeddings_of(part: Any) -> torch.nn.Module:  # noqa: ANN401  # an encoder or a decoder
    """The input embedding."""
    is_model = isinstance(part, PreTrainedModel)
    embeddings: object = (
        part.get_input_embeddings() if is_model else getattr(part, "embed_tokens", None)
    )
    if not isinstance(embeddings, torch.nn.Module):
        raise InvalidInput(type(part).__name__, got="none", expected="an embedding of tokens")
    return embeddings
