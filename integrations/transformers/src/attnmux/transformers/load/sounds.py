"""From files of sound to the inputs of an encoder, by the checkpoint's own feature extractor."""

from __future__ import annotations

import wave
from typing import Any

import numpy as np
import torch
from transformers import AutoFeatureExtractor

from attnmux.core import AttnmuxError, InvalidInput
from attnmux.transformers.load.checkpoint import Checkpoint
from attnmux.transformers.load.processors import load_processor

SAMPLE_BYTES = 2
"""Bytes of a sample: a 16-bit integer."""
FULL_SCALE = 32768.0
"""The loudest 16-bit sample; extractors take samples from -1 to 1."""
STREAMED = 0x7FFF0000
"""Bytes of sound from which a header only says that their number was unknown when it was written,
as in the output of a pipe."""


class SoundReader:
    """A checkpoint's feature extractor."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises InvalidInput for a model that reads no sound, and for a checkpoint without an
        extractor."""
        if not checkpoint.reads_sound:
            got = f"{checkpoint.source}, which reads no sound"
            raise InvalidInput("audio", got=got, expected="an encoder-decoder model of speech")
        self._extractor = load_processor(
            checkpoint,
            AutoFeatureExtractor,
            argument="audio",
            what="a feature extractor",
            files="preprocessor_config.json",
        )

    def read(self, file: str) -> dict[str, torch.Tensor]:
        """The encoder's inputs, for `ModelRunner.encode`.

        Raises InvalidInput for a file that is no sound of the extractor's rate, and for one that is
        longer than it takes, or shorter.
        """
        rate = int(self._extractor.sampling_rate)
        samples = read_samples(file, rate)
        most = getattr(self._extractor, "n_samples", None)
        if most is not None and len(samples) > most:
            got = f"{file}, of {len(samples) / rate:.1f} s"
            raise InvalidInput("audio", got=got, expected=f"at most {most / rate:g} s: cut it")
        try:
            inputs = self._extractor(samples, sampling_rate=rate, return_tensors="pt")
        except Exception as error:  # each extractor has errors of its own
            got = f"{file}, of {len(samples)} samples ({AttnmuxError.in_brief(error)})"
            expected = f"a sound that the {type(self._extractor).__name__} takes"
            raise InvalidInput("audio", got=got, expected=expected) from error
        return {name: tensor for name, tensor in inputs.items() if isinstance(tensor, torch.Tensor)}


def read_samples(file: str, rate: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The samples of a WAV file [n], from -1 to 1: the mean of its channels.

    rate: samples per second. Raises InvalidInput for another rate, and for a file that cannot be
    read or holds other samples than 16-bit integers.
    """
    expected = f"a WAV file of 16-bit PCM, {rate} samples per second: ffmpeg -i IN -ar {rate} OUT"
    try:
        with wave.open(file) as sound:
            facts, data = sound.getparams(), sound.readframes(sound.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        reason = getattr(error, "strerror", None) or AttnmuxError.in_brief(error)
        raise InvalidInput("audio", got=f"{file} ({reason})", expected=expected) from error
    frame = facts.nchannels * facts.sampwidth
    if len(data) < facts.nframes * frame < STREAMED:
        got = f"{file}, which ends after {len(data)} of {facts.nframes * frame} bytes of sound"
        raise InvalidInput("audio", got=got, expected="a whole file")
    data = data[: len(data) // frame * frame]
    if facts.sampwidth != SAMPLE_BYTES or facts.framerate != rate or not data:
        kind = f"{8 * facts.sampwidth} bits, {facts.framerate} samples per second"
        got = f"{file}, of {kind}, {len(data)} bytes"
        raise InvalidInput("audio", got=got, expected=expected)
    frames = np.frombuffer(data, dtype="<i2").reshape(-1, facts.nchannels)
    samples: np.ndarray[Any, np.dtype[np.float32]] = frames.mean(axis=1, dtype=np.float32)
    return samples / np.float32(FULL_SCALE)
