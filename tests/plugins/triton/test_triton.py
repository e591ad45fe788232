from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core.choosing.platform import Platform
from attnmux.core.errors import AttnmuxError, InvalidInput
from attnmux.core.testing import AttentionBackendTests, Candidate, make_world, prepare_step
from attnmux.core.testing.cases import Case, decode, extend
from attnmux.triton.cards.triton import TRITON

pytest.importorskip("triton")

from attnmux.triton.backend import TritonBackend
from attnmux.triton.call import LayerCall

CANDIDATE = Candidate(
    card=replace(TRITON, requires=(), status="available", factory="attnmux.triton.factory:triton"),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    # So few programs that requests are split and programs take several.
    factory=lambda context, options: TritonBackend(context, options, compute_units=3),
)


class TestTritonInterpreted(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (1, 16)  # to the kernels a page is a list of slots


def backend_of(*, max_batch_size: int = 4, **options: object) -> tuple[TritonBackend, Any]:
    case = Case(
        name="of-this-test", max_context_len=256, steps=(decode(200, 133),), deterministic=True
    )
    world = make_world(case, CANDIDATE.platform, "cpu")
    context = replace(world.context, max_batch_size=max_batch_size)
    return TritonBackend(context, options, compute_units=3), world


def test_more_requests_than_there_is_room_for_are_refused():
    backend, world = backend_of(max_batch_size=1)
    step = prepare_step(world, decode(200, 133))
    with pytest.raises(InvalidInput, match="max_batch_size, 1"):
        backend.init_forward_metadata(step.batch)
    given = step.inputs[0]
    with pytest.raises(AttnmuxError, match="no step is prepared"):
        backend.forward(given.q, given.k, given.v, given.layer, step.batch)


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_splits": 3}, {"split_tile_size": 64}, {"reduce_in_fp32": True}]
)
def test_a_deterministic_result_does_not_depend_on_the_batch(options):
    backend, world = backend_of(**options)
    both = prepare_step(world, decode(200, 133))
    backend.init_forward_metadata(both.batch)
    given = both.inputs[0]
    together = backend.forward(given.q, given.k, given.v, given.layer, both.batch)
    for place in (0, 1):
        alone = replace(
            both.batch,
            batch_size=1,
            **{
                name: getattr(both.batch, name)[place : place + 1]
                for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "positions")
            },
            seq_lens_cpu=None,
        )
        backend.init_forward_metadata(alone)
        q = given.q[place : place + 1]
        assert torch.equal(
            backend.forward(q, None, None, given.layer, alone), together[place : place + 1]
        )


def test_a_layer_that_the_pool_does_not_store_needs_its_own_keys():
    backend, world = backend_of()
    step = prepare_step(world, extend((0, 5)))
    backend.init_forward_metadata(step.batch)
    given = step.inputs[0]
    stranger = replace(given.layer, is_causal=False)
    call = LayerCall.of(stranger, world.context)
    with pytest.raises(AttnmuxError, match="not in the KV pool"):
        call.required_keys()
