"""Begins what the likely backends compile, while torch and transformers are imported.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attnmux.core import AttnmuxError, Measurement, Offer, Platform, Settings, solve_measured
from attnmux.core.verbs import requested
from attnmux.transformers import recall

FIELDS = ("dtype", "kv_dtype", "page_size")
"""Options that are fields of a request, by the same names."""
BACKENDS = ("backend", "prefill_backend", "decode_backend")


def begin_early(
    settings: Settings,
    options: Mapping[str, Any],
    wake: Callable[[str], object],
    offers: Sequence[Offer],
    platform: Platform,
) -> None:
    """Decide by the config.json of a local model, begin what those backends compile, and `wake` the
    device.

    options: of `generate`, by name. The decision that counts comes later, with every option and
    the errors: this one skips models of the hub and devices other than the platform's. wake: takes
    torch's name of a device.
    """
    with suppress(AttnmuxError):
        _begin(settings, options, offers, platform)
    wake(options["device"] or platform.device_type)


def _begin(
    settings: Settings, options: Mapping[str, Any], offers: Sequence[Offer], platform: Platform
) -> None:
    folder = recall.PATH if options["model"] is None else Path(options["model"])
    if options["device"] not in (None, platform.device_type) or not folder.is_dir():
        return
    fields = {name: options[name] for name in FIELDS if options[name] is not None}
    decision = solve_measured(
        requested(str(folder), [f"{name}={value}" for name, value in fields.items()], 1, None),
        platform,
        offers,
        settings.policy(**{name: options[name] for name in BACKENDS}),
        measurements=Measurement.read(settings.measurements_file()).found,
    )
    decision.begin_ahead(offers)
