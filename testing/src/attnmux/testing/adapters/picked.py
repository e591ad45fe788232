"""Tests of adapters for keys that an indexer picks, in addition to `AdapterTests`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnmux.core import AttentionBackend, GraphUnsupported, InvalidInput
from attnmux.testing.adapters.tests import AdapterTests, AdapterWorld, outputs
from attnmux.testing.cases.case import decode, extend, verify
from attnmux.testing.setup.prepared import PreparedStep


class PickedWorld(AdapterWorld):
    """Its batches have the first layer's picks."""

    def prepared(self, *args: Any, **more: Any) -> tuple[AttentionBackend, PreparedStep]:  # noqa: ANN401  # as AdapterWorld's
        backend, step = super().prepared(*args, **more)
        picks = step.inputs[0].topk_indices
        assert picks is not None
        assert step.batch.topk_indices is not None
        step.batch.topk_indices.copy_(picks)
        return backend, step


class PickedAdapterTests(AdapterTests):
    """`adapter` is a PickedWorld."""

    def test_metadata_is_made_once_a_step(self) -> None:
        """Only the tokens' rows of the request table: picks are looked up in each layer."""
        backend, prepared = self.adapter.prepared(extend((20, 3), (0, 9)))
        before = outputs(backend, prepared)
        prepared.batch.req_pool_indices.zero_()
        torch.testing.assert_close(outputs(backend, prepared), before, rtol=0, atol=0)

    def test_steps_that_are_refused(self) -> None:
        backend, prepared = self.adapter.prepared(decode(3), spec_topk=4)
        unpicked = replace(prepared, batch=replace(prepared.batch, topk_indices=None))
        with pytest.raises(InvalidInput, match="topk_indices: expected the keys that the indexer"):
            outputs(backend, unpicked)
        extending = self.adapter.prepared(extend((0, 3)))[1].batch
        backend.init_cuda_graph_state(4, 4)
        with pytest.raises(GraphUnsupported, match="EXTEND runs without a graph"):
            backend.init_forward_metadata_out_graph(extending, in_capture=True)
        with pytest.raises(InvalidInput, match="custom_mask"):
            self.adapter.prepared(verify(3, 7), spec_topk=4)
