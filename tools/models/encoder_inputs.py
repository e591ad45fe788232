"""What the encoder of a small random model reads: text of uneven lengths, or sound."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch

LENGTHS = (19, 1, 32, 7)
FRAMES = 40
SAMPLES = 4000

Inputs = Mapping[str, torch.Tensor]


def encoder_inputs(model: Any, seed: int, vocabulary: int) -> list[Inputs]:  # noqa: ANN401  # a model with an encoder
    """The inputs of the encoder for each prompt.

    Sound has the first of the likely shapes that the encoder accepts. Raises ValueError where it
    accepts none.
    """
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    name = model.main_input_name
    if name == "inputs":  # of whichever encoder is joined
        name = model.get_encoder().main_input_name
    if name == "input_ids":
        ids = ([rng.randrange(5, vocabulary - 5) for _ in range(length)] for length in LENGTHS)
        return [{name: torch.tensor([each])} for each in ids]
    errors = []
    for shape in _shapes(model.config, name):
        sounds: list[Inputs] = [{name: torch.randn(shape, generator=generator)} for _ in LENGTHS]
        try:
            model.get_encoder()(**sounds[0])
        except Exception as error:  # encoders raise anything
            errors.append(f"{shape}: {error}")
        else:
            return sounds
    raise ValueError(f"no shape of {name} that the encoder takes; {'; '.join(errors)}")


def _shapes(config: Any, name: str) -> Iterator[tuple[int, ...]]:  # noqa: ANN401  # any model's
    if name == "input_values":
        yield 1, SAMPLES
        return
    parts = [config, getattr(config, "encoder_config", None), getattr(config, "audio_config", None)]
    for part in parts:
        for field in ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim"):
            bins = getattr(part, field, None)
            if isinstance(bins, int):
                yield 1, bins, 2 * getattr(part, "max_source_positions", FRAMES // 2)
                yield 1, FRAMES, bins
