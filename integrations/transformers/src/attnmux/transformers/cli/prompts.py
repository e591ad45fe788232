"""The prompts of `attnmux generate`: from the command line, stdin and files.

Importing this module imports no torch.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from attnmux.core import InvalidInput
from attnmux.transformers import recall
from attnmux.transformers.requests.sampling_params import SamplingParams

SAMPLE_BYTES = 240

KEYS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "prompt": (str, list),
        "images": (list,),
        "audio": (str,),
        "max_new_tokens": (int,),
        "temperature": (int, float),
        "top_p": (int, float),
        "seed": (int,),
    }
)
"""The keys of a JSON line and their types."""

JSON_LINES = (".jsonl", ".ndjson")
"""Endings of files in which every line is JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UserPrompt:
    """One prompt, and the options that it overrides."""

    prompt: str | Sequence[int]
    """Text, or token ids."""
    images: Sequence[str] = ()
    """Files; the prompt is text if there are some."""
    audio: str | None = None
    """A file that takes the place of the prompt, which is empty."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Some of `KEYS`, without the prompt, its images and its audio."""


def read_prompts(
    prompts: Sequence[str],
    file: str | None,
    *,
    model: str | None,
    seed: int,
    images: Sequence[str] = (),
    audio: Sequence[str] = (),
) -> list[UserPrompt]:
    """The prompts of the command line, then those of the file; "-" is stdin in both.

    images: files that each prompt of the command line is about. audio: files that are prompts.

    For the shipped model one is made up if there is none. Raises UsageError for no prompts and
    for a stdin that is wanted twice or closed, InvalidInput for a file that cannot be used.
    """
    if [*prompts, file].count("-") > 1:
        raise click.UsageError("- reads stdin, which can be read only once.")
    if images and not prompts:
        raise click.UsageError("--image needs a PROMPT that is about it.")
    user_prompts = [
        UserPrompt(prompt=_stdin("stdin") if text == "-" else text, images=images)
        for text in prompts
    ]
    user_prompts += [UserPrompt(prompt="", audio=path) for path in audio]
    if file is not None:
        user_prompts += _from_file(file)
    if user_prompts:
        return user_prompts
    if model is not None:
        raise click.UsageError("Give a PROMPT, - to read one from stdin, or --prompts FILE.")
    prompt, answer = recall.make_prompt(random.Random(seed), SAMPLE_BYTES)
    click.echo(
        f"no prompt given; asking a random question whose answer is {answer}:\n{prompt}", err=True
    )
    return [UserPrompt(prompt=prompt)]


def _stdin(name: str) -> str:
    """All of stdin without the last line's end."""
    if sys.stdin is None:
        raise click.UsageError("- reads from stdin, which is closed.")
    return _decode(name, sys.stdin.buffer.read()).removesuffix("\n")


def _decode(name: str, data: bytes) -> str:
    """UTF-8 whatever the locale says, without the mark that some editors begin a file with."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(name, got=str(error), expected="text in UTF-8") from error


def _from_file(file: str) -> list[UserPrompt]:
    """One prompt a line, or one JSON object a line; blank lines do not count.

    JSON it is by the file's name, or as soon as one line is an object with a prompt: a typo in
    another line must not make a prompt of it.
    """
    if file == "-":
        text = _stdin("--prompts -")
    else:
        try:
            text = _decode(f"--prompts {file}", Path(file).read_bytes())
        except OSError as error:
            got = f"{file} ({error.strerror})"
            raise InvalidInput("--prompts", got=got, expected="a readable file") from error
    lines = [
        (f"{file}, line {number}", line.removesuffix("\r"))
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not lines:
        raise InvalidInput("--prompts", got=f"{file}, which is empty", expected="prompts")
    values = [_object(line) for _, line in lines]
    if not file.endswith(JSON_LINES) and all(value is None for value in values):
        return [UserPrompt(prompt=line) for _, line in lines]
    return [_from_json(*line, value) for line, value in zip(lines, values, strict=True)]


def _object(line: str) -> dict[str, Any] | None:
    """A line of JSON that speaks of a prompt or of sound; anything else is a prompt itself."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and {"prompt", "audio"} & value.keys() else None


def _from_json(name: str, line: str, value: dict[str, Any] | None) -> UserPrompt:
    if value is None:
        expected = 'a JSON object with "prompt" on every line'
        raise InvalidInput(name, got=f"{line[:60]!r}", expected=expected)
    for key, setting in value.items():
        if key not in KEYS:
            raise InvalidInput(name, got=f"{key!r}", expected=f"only {', '.join(KEYS)}")
        if not isinstance(setting, KEYS[key]) or isinstance(setting, bool):
            words = " or ".join(kind.__name__ for kind in KEYS[key])
            raise InvalidInput(f"{name}, {key}", got=f"{setting!r}", expected=words)
    audio, images = value.pop("audio", None), value.pop("images", [])
    if audio is not None and ("prompt" in value or images):
        got, expected = "a prompt or images too", "only audio"
        raise InvalidInput(f"{name}, audio", got=got, expected=expected)
    prompt = value.pop("prompt", "")
    if not all(isinstance(image, str) for image in images):
        raise InvalidInput(f"{name}, images", got="other values", expected="names of files")
    if images and not isinstance(prompt, str):
        raise InvalidInput(f"{name}, prompt", got="token ids, with images", expected="text")
    if isinstance(prompt, list) and not all(type(token) is int for token in prompt):
        raise InvalidInput(f"{name}, prompt", got="a list", expected="text or token ids")
    _check_ranges(name, value)
    return UserPrompt(prompt=prompt, overrides=value, images=images, audio=audio)


def _check_ranges(name: str, overrides: Mapping[str, Any]) -> None:
    if overrides.get("max_new_tokens", 1) < 1:
        got = overrides["max_new_tokens"]
        raise InvalidInput(f"{name}, max_new_tokens", got=got, expected="at least 1")
    try:
        SamplingParams(**{key: overrides[key] for key in overrides if key != "max_new_tokens"})
    except InvalidInput as error:
        argument = f"{name}, {error.argument}"
        raise InvalidInput(argument, got=error.got, expected=error.expected) from None
