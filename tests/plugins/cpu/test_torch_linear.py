"""Linear layers in plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmux.cpu.torch_linear.chunks import Chunks, run_chunks
from attnmux.testing import AttentionBackendTests


class TestTorchLinear(AttentionBackendTests):
    backend = "torch_linear"
    device = "cpu"
    sampled = 20


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    size=st.sampled_from([1, 2, 16, 64]),
)
def test_chunks_hold_each_token_once(lens, size) -> None:
    chunks = Chunks.of(lens, size, torch.device("cpu"))
    values = torch.arange(sum(lens)).view(-1, 1)
    joined = torch.full((sum(lens), 1), -1)
    chunks.join(chunks.cut(values), joined)
    assert joined.equal(values)
    assert int(chunks.filled.sum()) == sum(lens)
    ranks = [rows.tolist() for rows, _ in chunks.order]
    expected = max(-(-length // size) for length in lens)
    assert len(ranks) == expected
    for rank, requests in enumerate(ranks):
        assert requests == [i for i, length in enumerate(lens) if length > rank * size]


@pytest.mark.parametrize("channels", [1, 8])
@pytest.mark.parametrize("has_delta_rule", [True, False])
def test_chunks_of_any_size_give_the_same(channels, has_delta_rule) -> None:
    torch.manual_seed(3)
    tokens, heads, k_dim, v_dim = 45, 2, 8, 4
    q, k = torch.randn(2, tokens, heads, k_dim).unbind()
    k = torch.nn.functional.normalize(k, dim=-1)
    v, beta = torch.randn(tokens, heads, v_dim), torch.rand(tokens, heads, 1)
    g = torch.where(torch.rand(tokens, heads, channels) < 0.2, -300.0, -0.3)
    results = []
    for size in (1, 4, 64):
        chunks = Chunks.of([tokens], size, torch.device("cpu"))
        state = torch.ones(1, heads, k_dim, v_dim)
        cut = [chunks.cut(each) for each in (q, k, v, g, beta)]
        out = torch.empty(tokens, heads, v_dim)
        chunks.join(run_chunks(chunks, *cut, state, has_delta_rule=has_delta_rule), out)
        results.append((out, state))
    for out, state in results[1:]:
        torch.testing.assert_close(out, results[0][0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(state, results[0][1], atol=2e-5, rtol=1e-4)
