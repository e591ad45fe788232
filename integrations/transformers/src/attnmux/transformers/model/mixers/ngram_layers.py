"""Layers that add features of a token's n-grams: their states are the ids of the tokens before it.

Ids are no numbers for a 16-bit state. They are kept as digits of base 256, which every dtype of a
model holds exactly, by convolutions that only delay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from attnmux.transformers.model.mixers.mixer import Convolution, Mixer
from attnmux.transformers.model.mixers.mixer_calls import refuse_padding, row_of

BASE = 256


def ngram_features(mixer: Mixer) -> Callable[..., Any]:
    """Qwen4-Exp's: hashed n-grams choose embeddings, which a dilated convolution mixes.

    An n-gram does not reach over an end of text. Where there is no token, it has that one's id.
    """
    module: Any = mixer.module
    embedding = module.ple_embedding
    spaced = module.conv1d.dilation[0]
    taps = (module.conv1d.kernel_size[0] - 1) * spaced + 1
    # All convolutions of a layer have as many taps
    width = max(taps, 2)
    end = embedding.eos_token_id
    # One more than an id, so that 0 is no token
    places = [1]
    while places[-1] * BASE <= embedding.unigram_vocab_size:
        places.append(places[-1] * BASE)

    def before(ids: torch.Tensor) -> torch.Tensor:
        """Of ids [T], that of the token before each."""
        digits = torch.stack([(ids + 1) // place % BASE for place in places], dim=1)
        x = digits.to(module.conv1d.weight.dtype)
        weight = x.new_zeros((len(places), width))
        weight[:, -2] = 1
        found = mixer.convolve(Convolution(x=x, weight=weight, bias=None, silu=False)).long()
        known = found[:, 0] - 1
        for n, place in enumerate(places[1:], start=1):
            known = known + found[:, n] * place
        return torch.where(known < 0, end, known)

    def convolve(hidden_states: torch.Tensor, _: None) -> torch.Tensor:
        x, own = row_of(mixer, hidden_states).contiguous(), module.conv1d.weight.squeeze(1)
        weight = x.new_zeros((own.shape[0], width))
        weight[:, width - taps :: spaced] = own
        asked = Convolution(x=x, weight=weight, bias=None, silu=True)
        return mixer.convolve(asked).unsqueeze(0)

    def forward(
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        past_key_values: None = None,
        conv_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        refuse_padding(mixer, conv_mask)
        ids = row_of(mixer, input_ids).long()
        ngram = [ids]
        for _ in range(embedding.context_len):
            ngram.append(before(torch.where(ids == end, end, ngram[-1])))
        embedding._shift_right_ignore_eos = lambda _, shift: ngram[shift].unsqueeze(0)
        made: torch.Tensor = type(module).forward(module, hidden_states, input_ids, None)
        return made

    module._short_conv = convolve
    return forward
