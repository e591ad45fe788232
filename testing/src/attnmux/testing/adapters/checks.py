"""Checks of adapters that some of them need, next to the tests of `AdapterTests` that all pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import AttentionBackend, ForwardBatch, GraphConfig, GraphRunner, InvalidInput
from attnmux.testing.adapters.tests import AdapterWorld, misaligned, outputs
from attnmux.testing.cases.case import Step, decode, extend, verify
from attnmux.testing.graphs.recording import RecordingGraphs
from attnmux.testing.setup.placement import buffers
from attnmux.testing.setup.prepared import PreparedStep


def check_rows_are_copied(backend: AttentionBackend, prepared: PreparedStep) -> None:
    """The first layer has the same results for rows and LSE that kernels cannot load or store."""
    first = prepared.inputs[0]
    lse = torch.zeros(first.q.shape[:2])
    expected = outputs(backend, replace(prepared, inputs=(first,)), lse=lse)[0]
    rows = {name: getattr(first, name) for name in ("q", "q_rope", "k", "k_rope", "v")}
    moved: dict[str, Any] = {
        name: misaligned(each) for name, each in rows.items() if each is not None
    }
    odd = replace(first, **moved)
    out, apart = misaligned(torch.full_like(expected, 7)), torch.zeros_like(lse.t()).t()
    assert outputs(backend, replace(prepared, inputs=(odd,)), out=out, lse=apart)[0] is out
    assert torch.equal(out, expected)
    assert torch.equal(apart, lse)


def check_keys_of_another_dtype_are_refused(adapter: AdapterWorld, reason: str) -> None:
    """Keys of the call, in float32. reason: a pattern."""
    backend, made = adapter.prepared(extend((0, 5)), kv_in_pool=False, save_kv_cache=False)
    given = made.inputs[0]
    assert given.k is not None
    k_rope = None if given.k_rope is None else given.k_rope.float()
    wide = replace(given, k=given.k.float(), k_rope=k_rope)
    with pytest.raises(InvalidInput, match=reason):
        outputs(backend, replace(made, inputs=(wide,)))


def check_large_queries_saturate(
    adapter: AdapterWorld,
    **settings: Any,  # noqa: ANN401  # fields of Case
) -> None:
    """Queries beyond the range of e4m3 become its largest values, and not NaN."""
    backend, made = adapter.prepared(decode(5), **settings)
    for given in made.inputs:
        q_rope = None if given.q_rope is None else given.q_rope * 1e4
        large = replace(made, inputs=(replace(given, q=given.q * 1e4, q_rope=q_rope),))
        assert outputs(backend, large)[0].isfinite().all()


def check_runners_of_two_modes(
    adapter: AdapterWorld,
    *,
    sizes: tuple[int, int] = (2, 2),
    **settings: Any,  # noqa: ANN401  # fields of Case
) -> None:
    """Runners of decode and of verification capture graphs of up to `sizes` requests on one
    backend, and replay them by turns with the results of eager steps."""
    steps = decode(5, 30), verify(4, 9, 20)
    given = {"spec_topk": 1, "kv_in_pool": True, "page_size": 1, **settings}
    world = adapter.world(*steps, **given)
    backend = adapter.backend(world.context)

    def runner(step: Step, tokens: int, size: int) -> tuple[GraphRunner, PreparedStep]:
        made = adapter.prepare(world, step)
        padding = (0, 0, 0, 0, 0, size * tokens)
        padded = [
            {
                name: torch.nn.functional.pad(getattr(each, name), padding)
                for name in ("q", "q_rope")
                if getattr(each, name) is not None
            }
            for each in made.inputs
        ]

        def call(batch: ForwardBatch, inputs: object) -> list[torch.Tensor]:
            rows: list[dict[str, Any]] = [
                {name: q[: batch.num_tokens] for name, q in each.items()} for each in padded
            ]
            given = [replace(each, **own) for each, own in zip(made.inputs, rows, strict=True)]
            return outputs(backend, replace(made, batch=batch, inputs=tuple(given)))

        config = GraphConfig(
            batch_sizes=tuple(sorted({2, size})),
            forward_mode=step.mode,
            tokens_per_request=tokens,
            host_lens=True,
        )
        found = GraphRunner(backend, call, config, devices=RecordingGraphs(), progress=iter)
        found.capture(made.batch)
        return found, made

    runners = [runner(steps[0], 1, sizes[0]), runner(steps[1], 4, sizes[1])]
    # The second step took the place of what the first one put into the pool.
    for layer in world.context.layers:
        for buffer in buffers(world, layer.layer_id):
            buffer.normal_(generator=world.generator)
    table, pool = world.context.req_to_token_pool.req_to_token, world.context.token_to_kv_pool
    table.random_(1, pool.num_slots, generator=world.generator)
    for found, made in (*runners, *runners):
        replayed = [out.clone() for out in found.replay(made.batch)]
        backend.init_forward_metadata(made.batch)
        torch.testing.assert_close(replayed, outputs(backend, made))
