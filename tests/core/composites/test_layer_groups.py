"""A backend for each group of layers whose heads or dims differ."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from attnmux.core import (
    BackendContext,
    BackendFailed,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    JoinedKVPool,
    LayerGroup,
    LayerSpec,
    MHATokenToKVPool,
    Offer,
    ReqToTokenPool,
    Request,
    Workspace,
    build,
    solve,
)
from attnmux.core.composites.layer_groups import LayerGroupsBackend
from attnmux.core.plugin import one_of
from attnmux.parts.two_batches import TboAttnBackend
from attnmux.testing import FakeBackend, fake_card, fake_platform

CPU = torch.device("cpu")
GROUP = LayerGroup(layers=1, num_q_heads=4, num_kv_heads=1, head_dim=16)


class Recorded(FakeBackend):
    """Counts what it is asked for."""

    def __init__(self, context, options=()) -> None:
        super().__init__(context, {})
        self.calls: list[int] = []

    def forward_decode(self, call, batch):
        self.calls.append(call.layer.layer_id)
        return super().forward_decode(call, batch)


class OtherFill(FakeBackend):
    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 7


@pytest.fixture(autouse=True)
def _importable(monkeypatch, request) -> None:
    monkeypatch.setitem(sys.modules, __name__, request.module)


def layer(number, kv_heads=2, dim=8, **changes):
    heads = {"tp_q_head_num": 4, "tp_k_head_num": kv_heads, "tp_v_head_num": kv_heads}
    dims = {"qk_head_dim": dim, "v_head_dim": dim, "scaling": 0.3}
    return LayerSpec(layer_id=number, **heads, **dims, **changes)


NARROW, WIDE = {"kv_heads": 2, "dim": 8}, {"kv_heads": 1, "dim": 16}


def decided(narrow="Recorded", wide="Recorded", **changes):
    offers = []
    for name, dim, factory in (("narrow", 8, narrow), ("wide", 16, wide)):
        clauses = tuple(replace(one, head_dim=one_of(dim)) for one in fake_card().clauses)
        card = replace(fake_card(), name=name, clauses=clauses, factory=f"{__name__}:{factory}")
        offers.append(Offer(card=card, plugin="fakes"))
    request = Request(num_q_heads=4, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
    request = request.replace(other_layers=[GROUP], sliding_window=5, **changes)
    return solve(request, fake_platform(), offers)


def context(decision, *layers):
    layers = layers or (layer(0, sliding_window_size=5), layer(1, **WIDE), layer(2))
    shared = {"size": 64, "page_size": 4, "dtype": torch.float32, "device": CPU}
    pools = [
        MHATokenToKVPool(
            layer_ids=[each.layer_id for each in layers if each.qk_head_dim == dim],
            num_kv_heads=kv_heads,
            head_dim=dim,
            **shared,
        )
        for kv_heads, dim in ((2, 8), (1, 16))
    ]
    return BackendContext(
        request=decision.request,
        platform=decision.platform,
        device=CPU,
        layers=layers,
        req_to_token_pool=ReqToTokenPool(4, 32, CPU),
        token_to_kv_pool=JoinedKVPool(pools),
        workspace=Workspace(CPU),
        max_batch_size=4,
        max_context_len=32,
    )


def step(backend):
    table = backend.context.req_to_token_pool
    rows = torch.tensor(table.alloc(1))
    loc = torch.tensor([4])
    empty, one = torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    table.write(rows, empty, one, loc)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=1,
        req_pool_indices=rows,
        seq_lens=one,
        out_cache_loc=loc,
        positions=torch.zeros(1, dtype=torch.int64),
    )


def test_each_layer_runs_on_its_group_s_backend() -> None:
    decision = decided()
    backend = build(decision, context(decision))
    assert isinstance(backend, LayerGroupsBackend)
    narrow, wide = backend.members
    assert [one.layer_id for one in narrow.context.layers] == [0, 2]
    assert narrow.context.request == decision.groups[0].request
    assert wide.context.request == decision.others[0].request
    batch = step(backend)
    backend.init_forward_metadata(batch)
    for one in backend.context.layers:
        q = torch.randn(1, 4, one.qk_head_dim)
        k, v = torch.randn(2, 1, one.tp_k_head_num, one.qk_head_dim)
        out = backend.forward(q, k, v, one, batch)
        torch.testing.assert_close(out, v.repeat_interleave(4 // one.tp_k_head_num, dim=1))
    assert (narrow.calls, wide.calls) == ([0, 2], [1])


def test_layers_of_one_shape_may_keep_another_kv_dtype() -> None:
    """Each group's backend gets the pool of its own dtype."""
    request = Request(num_q_heads=4, num_kv_heads=2, head_dim=8, dtype="float32", page_size=4)
    kept = LayerGroup(layers=1, num_q_heads=4, num_kv_heads=2, head_dim=8, kv_dtype=torch.float32)
    asked = request.replace(kv_dtype="fp8_e4m3", other_layers=[kept])
    card = replace(fake_card(), factory=f"{__name__}:Recorded")
    decision = solve(asked, fake_platform(), [Offer(card=card, plugin="fakes")])
    assert [each.kv_dtype for each in decision.groups] == ["fp8_e4m3", "float32"]
    layers = layer(0), layer(1, kv_dtype="float32"), layer(2)
    given = {"size": 64, "page_size": 4, "num_kv_heads": 2, "head_dim": 8, "device": CPU}
    low = MHATokenToKVPool(dtype=torch.float8_e4m3fn, layer_ids=[0, 2], **given)
    high = MHATokenToKVPool(dtype=torch.float32, layer_ids=[1], **given)
    pool = JoinedKVPool([low, high])
    whole = replace(context(decision, *layers), token_to_kv_pool=pool)
    backend = build(decision, whole)
    assert [one.context.token_to_kv_pool.dtype for one in backend.members] == [
        low.dtype,
        high.dtype,
    ]
    batch = step(backend)
    backend.init_forward_metadata(batch)
    for one in layers:
        q, k, v = torch.rand(1, 4, 8), *torch.rand(2, 1, 2, 8)
        out = backend.forward(q, k, v, one, batch)
        seen = v if one.layer_id == 1 else v.to(low.dtype).float()
        torch.testing.assert_close(out, seen.repeat_interleave(2, dim=1))
    assert [one.calls for one in backend.members] == [[0, 2], [1]]
    for wrong, said in (
        (
            MHATokenToKVPool(dtype=torch.float32, layer_ids=[0, 1, 2], **given),
            "KV dtype, fp8_e4m3, got float32",
        ),
        (
            JoinedKVPool([low, MHATokenToKVPool(dtype=torch.float16, layer_ids=[1], **given)]),
            "KV dtype, float32, got float16",
        ),
    ):
        with pytest.raises(InvalidInput, match=said):
            build(decision, replace(whole, token_to_kv_pool=wrong))
    plain = solve(
        request.replace(kv_dtype="fp8_e4m3"), fake_platform(), [Offer(card=card, plugin="fakes")]
    )
    with pytest.raises(
        InvalidInput, match="layer 1: expected fp8_e4m3, as decided, got kv_dtype float32"
    ):
        build(
            plain,
            replace(
                whole,
                request=plain.request,
                token_to_kv_pool=MHATokenToKVPool(dtype=low.dtype, layer_ids=[0, 1, 2], **given),
            ),
        )


def test_two_halves_have_groups_each() -> None:
    decision = decided(two_batches=True)
    backend = build(decision, context(decision))
    assert isinstance(backend, TboAttnBackend)
    assert all(
        isinstance(each, LayerGroupsBackend) for each in (backend.primary, *backend.children)
    )


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([layer(0), layer(1, kv_heads=4)], "layer 1: expected the heads, dims and KV dtype of one"),
        ([layer(0), layer(1, **WIDE, kv_dtype="bf16")], "layer 1: .* 16, KV in bfloat16"),
        ([layer(0), layer(1)], "context.layers: expected layers of each group"),
        ([layer(0), layer(1, **WIDE, sliding_window_size=3)], "layer 1: expected the heads"),
        ([layer(0), layer(1, **WIDE, logit_cap=2.0)], "choose again with logit_cap set"),
    ],
)
def test_layers_that_the_decision_does_not_know_are_refused(layers, said) -> None:
    decision = decided()
    with pytest.raises(InvalidInput, match=said):
        build(decision, context(decision, *layers))


def test_backends_with_other_padding_rows_are_not_joined() -> None:
    decision = decided(wide="OtherFill")
    with pytest.raises(BackendFailed, match="padding rows of 7 tokens") as caught:
        build(decision, context(decision))
    assert caught.value.address == "fakes/wide"


def test_each_layer_is_in_one_group() -> None:
    decision = decided()
    whole = context(decision)
    group = FakeBackend(replace(whole, layers=whole.layers[:2]))
    with pytest.raises(InvalidInput, match="each layer of the context in one group"):
        LayerGroupsBackend(whole, [group])
