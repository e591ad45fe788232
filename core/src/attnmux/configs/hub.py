"""Models by their id on the Hugging Face Hub."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from attnmux.core import AttnmuxError, InvalidInput

ID = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}")
EXPECTED = "a folder with a Hugging Face config.json, that file, a GGUF file, or an id of the hub"
MODELOPT_FILE = "hf_quant_config.json"
"""The scheme of a checkpoint by ModelOpt, which may be next to config.json."""


def local_path(model: str | Path) -> Path:
    """The path, or, for an id of the hub that is no path here, the folder of its config.json.

    huggingface_hub downloads it into its cache, without weights, or finds it there. Raises
    InvalidInput without that library, and if the hub does not give the file.
    """
    if os.path.exists(model) or not ID.fullmatch(str(model)):
        return Path(model)
    try:
        import huggingface_hub  # noqa: PLC0415  # only for ids
        from huggingface_hub.errors import EntryNotFoundError  # noqa: PLC0415
    except ImportError:
        expected = f"{EXPECTED} (pip install huggingface_hub)"
        raise InvalidInput("model", got=f"{model}: no such file", expected=expected) from None
    try:
        file = huggingface_hub.hf_hub_download(str(model), "config.json")
        with suppress(EntryNotFoundError):
            huggingface_hub.hf_hub_download(str(model), MODELOPT_FILE)
    except Exception as error:  # the network's, the hub's, and those of its cache
        got = f"{model}: no such file, and the hub did not give it: {AttnmuxError.in_brief(error)}"
        raise InvalidInput("model", got=got, expected=EXPECTED) from error
    return Path(file).parent
