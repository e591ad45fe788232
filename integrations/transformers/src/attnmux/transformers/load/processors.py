"""Loads a checkpoint's processors of inputs other than text."""

from __future__ import annotations

from typing import Any

from attnmux.core import AttnmuxError, InvalidInput
from attnmux.transformers.load.checkpoint import ALWAYS, Checkpoint, quiet_transformers


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
