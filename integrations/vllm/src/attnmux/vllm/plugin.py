"""The entry points that every process of vLLM calls. vLLM is imported when they run."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from attnmux.vllm.interfaces import INTEGRATION, PLATFORM, REGISTRATION

NAME = "ATTNMUX"
BACKEND = "attnmux.vllm.AttnmuxBackend"
"""Loading it checks the interfaces that it uses."""
PLATFORM_GROUP = "vllm.platform_plugins"
PLATFORMS = {"vllm.platforms.cpu.CpuPlatform": "attnmux.vllm.cpu.AttnmuxCpuPlatform"}
"""Platforms of vLLM that take a backend of their own whatever the user named, and those that ask
the named one. Every other platform asks."""


def register() -> None:
    """Make `--attention-backend ATTNMUX` and CUSTOM mean attnmux.

    A CUSTOM that another package registered stays as it is. A vLLM whose names cannot be registered
    is a warning.
    """
    if not INTEGRATION.fits(REGISTRATION):
        return
    from vllm.v1.attention.backends.registry import (  # noqa: PLC0415  # vLLM is here when it calls
        AttentionBackendEnum,
        register_backend,
    )

    if NAME not in AttentionBackendEnum.__members__:
        member = AttentionBackendEnum.register(NAME, BACKEND)
        # vLLM's processes read their configuration before they load plugins
        member.__reduce_ex__ = lambda protocol: (_named, ())
    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


def platform() -> str | None:
    """The platform class to use in place of vLLM's own; None for vLLM's own.

    It is None, too, if another package offers a platform: vLLM admits one.
    """
    others = [
        entry_point
        for entry_point in entry_points(group=PLATFORM_GROUP)
        if entry_point.value != _SELF
    ]
    if others:
        return None
    from vllm.platforms import builtin_platform_plugins  # noqa: PLC0415  # as above

    found = [name for detect in builtin_platform_plugins.values() if (name := detect())]
    ours = PLATFORMS.get(found[0]) if len(found) == 1 else None
    return ours if ours and INTEGRATION.fits(PLATFORM) else None


def _named() -> Any:  # noqa: ANN401  # a member of vLLM's enum
    """The member of vLLM's enum, in a process that has read no plugin yet."""
    register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415  # as above

    return AttentionBackendEnum[NAME]


_SELF = "attnmux.vllm.plugin:platform"
