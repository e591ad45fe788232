"""From a text and files of images to the inputs of a model, by the checkpoint's processor."""

from __future__ import annotations

import wave
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from transformers import AutoFeatureExtractor, AutoProcessor

from attnmux.core import AttnmuxError, InvalidInput
from attnmux.transformers.load.checkpoint import ALWAYS, Checkpoint, quiet_transformers
from attnmux.transformers.load.tokenization import TEMPLATE_SECONDS, within


def load_processor(
    checkpoint: Checkpoint,
    auto: Any,  # noqa: ANN401  # transformers' own
    *,
    argument: str,
    what: str,
    files: str,
) -> Any:  # noqa: ANN401
    """Load a processor from the checkpoint's files with `auto`, an auto class of transformers.

    Raises InvalidInput that names `argument`, what is missing, and the files that it needs.
    """
    try:
        with quiet_transformers(progress=False):
            return auto.from_pretrained(checkpoint.source, **checkpoint.place, **ALWAYS)
    except Exception as error:  # each library has errors of its own
        raise InvalidInput(
            argument,
            got=f"{checkpoint.source}, without {what} ({AttnmuxError.in_brief(error)})",
            expected=f"a checkpoint with {files}",
        ) from error


FILES = "preprocessor_config.json or processor_config.json"
MOST_OF_16_BITS = 65535
INSTALL = "pip install 'attnmux-transformers[images]'"


class ImageProcessor:
    """A checkpoint's processor of texts with images."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Raises InvalidInput for a checkpoint of text alone or without files of a processor, and
        if a package that reads images is missing."""
        if not checkpoint.reads_images:
            got = f"{checkpoint.source}, which reads only text"
            raise InvalidInput("image", got=got, expected="a model that reads images")
        _require("PIL")
        checkpoint.require_tokenizer()
        self._source = checkpoint.source
        try:
            self._processor = load_processor(
                checkpoint, AutoProcessor, argument="image", what="a processor", files=FILES
            )
        except InvalidInput as error:
            message = str(error.__cause__)
            if "torchvision" in message or "VIDEO_PROCESSOR" in message:
                _require("torchvision")
            raise
        if getattr(self._processor, "image_processor", None) is None:
            raise InvalidInput(
                "image",
                got=f"{checkpoint.source}, whose processor takes only text",
                expected=f"a checkpoint with {FILES}",
            )

    def read(
        self, name: str, text: str, files: Sequence[str], *, chat: bool = False
    ) -> dict[str, torch.Tensor]:
        """The inputs of one prompt, for `ModelRunner.read_images`.

        chat: put the images, then the text, into the processor's chat template. Without it the text
        has a placeholder for each image. name: of the prompt, for errors.
        Raises InvalidInput for files that are no images, for a number of placeholders that is not
        that of the images, and without a chat template.
        """
        pictures = [read_image(file) for file in files]
        shown = self._in_template(text, len(pictures)) if chat else text
        token = self._placeholder()
        placeholders = shown.count(token)
        if placeholders != len(pictures):
            raise InvalidInput(
                name,
                got=f"{placeholders} placeholders {token} for {len(pictures)} images",
                expected="one for each image, or --chat, which puts them before the text",
            )
        try:
            inputs = self._processor(
                text=[shown],
                images=[pictures],
                return_tensors="pt",
                # The template writes the special tokens itself
                add_special_tokens=not chat,
            )
        except Exception as error:  # each processor has errors of its own
            expected = f"a text and images that the processor of {self._source} takes"
            raise InvalidInput(name, got=AttnmuxError.in_brief(error), expected=expected) from error
        return {key: tensor for key, tensor in inputs.items() if isinstance(tensor, torch.Tensor)}

    def _placeholder(self) -> str:
        """The text that stands for an image. Gemma 3's processor writes the tokens around it."""
        token = getattr(self._processor, "image_token", None)
        if hasattr(self._processor, "full_image_sequence"):
            token = getattr(self._processor, "boi_token", token)
        if not isinstance(token, str):
            raise InvalidInput(
                "image",
                got=f"a processor of {self._source} that names no image_token",
                expected="one that does",
            )
        return token

    def _in_template(self, text: str, num_images: int) -> str:
        if not getattr(self._processor, "chat_template", None):
            raise InvalidInput(
                "chat", got="a processor without a chat template", expected="raw prompts"
            )
        content = [{"type": "image"}] * num_images + [{"type": "text", "text": text}]
        message = [{"role": "user", "content": content}]
        render = partial(
            self._processor.apply_chat_template, message, tokenize=False, add_generation_prompt=True
        )
        return str(within(TEMPLATE_SECONDS, render))


def read_image(file: str) -> Any:  # noqa: ANN401  # Pillow may be missing
    """The image in a file, in RGB, turned as its metadata says.

    Raises InvalidInput for a file that cannot be read, or that is no image.
    """
    _require("PIL")
    pillow, ops = resolve_name("PIL.Image"), resolve_name("PIL.ImageOps")
    expected = "a file with an image"
    try:
        with pillow.open(file) as image:
            return _in_8_bits(ops.exif_transpose(image), file).convert("RGB")
    except pillow.UnidentifiedImageError as error:
        got = f"{file}, whose format Pillow does not know"
        raise InvalidInput("image", got=got, expected=expected) from error
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or AttnmuxError.in_brief(error)
        raise InvalidInput("image", got=f"{file} ({reason})", expected=expected) from error


def _in_8_bits(image: Any, file: str) -> Any:  # noqa: ANN401  # as above
    """The image with 8 bits a channel. Pillow's own conversion would cut more bits off, so that all
    but the darkest pixels were white.

    Raises InvalidInput for pixels without a range.
    """
    if not image.mode.startswith(("I", "F")):
        return image
    pixels = np.asarray(image)
    if image.mode == "F" or pixels.min() < 0 or pixels.max() > MOST_OF_16_BITS:
        got = f"{file}, of pixels from {pixels.min():g} to {pixels.max():g}"
        raise InvalidInput("image", got=got, expected="8 or 16 bits a channel")
    scaled = np.round(pixels.astype(np.float32) * (255 / MOST_OF_16_BITS))
    return resolve_name("PIL.Image").fromarray(scaled.astype(np.uint8))


def _require(module: str) -> None:
    if find_spec(module) is None:
        package = {"PIL": "Pillow"}.get(module, module)
        raise InvalidInput("image", got=f"no {package}", expected=INSTALL)


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
