"""Which platform a model is to run on."""

from __future__ import annotations

from dataclasses import replace

import torch

from attnmux.core.choosing.find.devices import Detection, pick_platform
from attnmux.core.choosing.machine.platform import Platform
from attnmux.core.errors import InvalidInput
from attnmux.core.settings import Settings


def platform_for(detection: Detection, settings: Settings, device: str | None) -> Platform:
    """The platform of a torch device; without one the configured or the only accelerator's.

    Raises InvalidInput for a device that is not here, or that this build of torch cannot use.
    """
    platform = pick_platform(detection, settings.platform) if device is None else None
    name = device or (platform.device_type if platform is not None else "cpu")
    try:
        kind = torch.device(name).type
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            "--device", came=f"{name} ({reason})", expected="a device that torch can use here"
        ) from error
    if platform is not None:
        return platform
    found = tuple(one for one in detection.platforms if one.device_type == kind)
    if not found:
        present = ", ".join(sorted({one.device_type for one in detection.platforms}))
        raise InvalidInput("--device", came=name, expected=f"one of {present}")
    return pick_platform(replace(detection, platforms=found))
