"""The entry point that every process of SGLang calls. SGLang is imported when it runs."""

# ruff: noqa: PLC0415  # SGLang is imported after its interfaces were checked

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from attnmux.sglang.asking import NAME, asked
from attnmux.sglang.interfaces import INTEGRATION, REGISTRATION, SERVING

if TYPE_CHECKING:
    from attnmux.sglang.backend import AttnmuxAttnBackend


def register() -> None:
    """Make `--attention-backend attnmux` known, and its flags for prefill, decode and drafts.

    An SGLang whose names cannot be registered is a warning, and nothing is registered.
    """
    if not INTEGRATION.fits(REGISTRATION):
        return
    from sglang.srt.arg_groups.choices import (
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
        add_draft_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_attention_backend_choices([NAME])
    add_draft_attention_backend_choices([NAME])
    add_deterministic_attention_backend_choices([NAME])
    register_attention_backend(NAME)(create)
    HookRegistry.register(
        "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        _adjusting,
        HookType.AROUND,
    )
    HookRegistry.register(
        "sglang.srt.arg_groups.model_hook.resolved_view", _as_listed, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
        _with_drafts,
        HookType.AROUND,
    )


def create(runner: Any) -> AttnmuxAttnBackend:  # noqa: ANN401  # SGLang's ModelRunner
    """The backend of a model runner, whose pools and request table exist."""
    INTEGRATION.require(SERVING)
    from attnmux.sglang.backend import AttnmuxAttnBackend
    from attnmux.sglang.latent import serve_latent

    serve_latent(NAME, runner)
    return AttnmuxAttnBackend(runner)


BACKENDS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
"""SGLang's arguments that name one."""
LISTING = (
    *("GptOssForCausalLM", "Llama4ForConditionalGeneration", "Llama4ForCausalLM"),
    *("Exaone4ForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
)
"""Models for which SGLang lists the backends by name, for features that requests state: sinks,
attention chunks and windows."""
LISTED = "triton"
"""A backend that SGLang lists for each of them."""
ADJUSTED: ContextVar[bool] = ContextVar("attnmux_sglang_adjusted", default=False)
"""Whether SGLang adjusts the arguments of such a model."""


def _adjusting(original: Any, server_args: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    from sglang.srt.arg_groups.model_hook import model_config_of

    architectures = model_config_of(server_args).hf_config.architectures or ()
    token = ADJUSTED.set(not set(LISTING).isdisjoint(architectures))
    try:
        adjusted = original(server_args, *args, **kwargs)
    finally:
        ADJUSTED.reset(token)
    begin_ahead(server_args)
    return adjusted


def begin_ahead(server_args: Any) -> None:  # noqa: ANN401  # SGLang's ServerArgs
    """Begin what the backend of a local model compiles, decided by its config.json and SGLang's
    device. `create` decides for the layers, once weights are loaded.

    Does nothing for another attention backend, and where nothing can be decided yet.
    """
    with suppress(Exception):
        if NAME not in {getattr(server_args, name) for name in BACKENDS}:
            return
        from attnmux.configs import request_from_model
        from attnmux.core import Chooser

        chooser = Chooser.here(server_args.device)
        request = asked(request_from_model(server_args.model_path), captures=False)
        chooser.decide(request).begin_ahead(chooser.offers)


class _AsListed:
    """SGLang's arguments, in which attnmux counts as a backend that is listed."""

    def __init__(self, view: Any) -> None:  # noqa: ANN401  # SGLang's ResolvedView
        self._view = view

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # any argument
        value = getattr(self._view, name)
        return LISTED if value == NAME and name.endswith("attention_backend") else value


def _as_listed(original: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    view = original(*args, **kwargs)
    return _AsListed(view) if ADJUSTED.get() else view


def _with_drafts(
    original: Any,  # noqa: ANN401  # the method that SGLang's hook passes
    factory: Any,  # noqa: ANN401  # SGLang's DraftBackendFactory
    backend_name: str,
    backend_map: dict[str, Any],
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Add attnmux to the draft backends that SGLang's factory knows."""

    def make() -> tuple[str, Any]:
        from attnmux.sglang.draft import AttnmuxMultiStepDraftBackend

        if kwargs.get("stamps_children"):  # drafts of several steps, by SGLang's own sign
            steps = factory.speculative_num_steps
            return NAME, AttnmuxMultiStepDraftBackend(
                factory.draft_model_runner, topk=factory.topk, num_steps=steps
            )
        return NAME, create(factory.draft_model_runner)

    return original(factory, backend_name, {**backend_map, NAME: make}, *args, **kwargs)
