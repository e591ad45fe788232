"""What decided backends do before their first step, done while the model's weights are read: first
cases on those that did not pass here, and compiling."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from threading import Thread

from attnmux.core import BackendContext, Decision, LayerSpec, build, make_context
from attnmux.core.plugin import rehearse
from attnmux.transformers.options import RunnerOptions

POOL_TOKENS = 4096
"""Room of the pool: kernels are the same over a larger one."""


class Ahead:
    """Prepares the backends of a decision in a thread.

    `join` waits for it. Whoever makes the backends then finds kernels that are compiled and cases
    that passed, and meets the same errors again: here they are dropped.
    """

    def __init__(self, decision: Decision | None, options: RunnerOptions) -> None:
        """decision: None if nothing is known before the model runs."""
        self._decision, self._options = decision, options
        # A daemon: a compiler must not keep the interpreter from exiting
        self._thread = Thread(target=self._run, args=(decision,), name="attnmux-ahead", daemon=True)

    def begin(self) -> None:
        """Does nothing without a decision, and for several ranks, which make backends together."""
        if self._decision is not None and self._options.ranks.size == 1:
            self._thread.start()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self, decision: Decision) -> None:
        with suppress(Exception):
            if self._options.check is not None:
                self._options.check(decision)
            take_steps(decision, self._options)


def take_steps(decision: Decision, options: RunnerOptions) -> None:
    """Make the decided backends, which compiles, and attend in each phase, over a pool of
    `POOL_TOKENS`."""
    rehearse(build(decision, _context(decision, options)))


def _context(decision: Decision, options: RunnerOptions) -> BackendContext:
    """A layer of each kind of the model."""
    layers: list[LayerSpec] = []
    for group in (decision, *decision.others):
        layer = LayerSpec.of(group.request, len(layers))
        layers.append(layer)
        if layer.sliding_window_size >= 0 or layer.attention_chunk_size:
            layers.append(
                replace(layer, layer_id=len(layers), sliding_window_size=-1, attention_chunk_size=0)
            )
    return make_context(
        decision,
        layers=layers,
        size=POOL_TOKENS,
        max_batch_size=options.max_batch_size,
        max_context_len=options.max_context_len,
        device=options.device,
        launches=options.launches,
    )
