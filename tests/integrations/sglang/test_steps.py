"""Steps, layers and pools that a CPU's engine cannot show: drafts, verification, window pools."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")
pytest.importorskip("attnmux.sglang")

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode as SglangMode

from attnmux.core import ForwardMode, InvalidInput, LayerSpec, MHATokenToKVPool
from attnmux.core.contract.spec import whole_mask
from attnmux.parts.speculation import tree_visibility
from attnmux.sglang import latent, layers, plugin
from attnmux.sglang.asking import asked
from attnmux.sglang.backend import AttnmuxAttnBackend
from attnmux.sglang.draft import AttnmuxMultiStepDraftBackend
from attnmux.sglang.pools import SglangWindowPool
from attnmux.sglang.steps import StepBuilder

PREFIXES = [5, 3]
PARENTS = torch.tensor([[-1, 0, 0, 1], [-1, 0, 1, 1]])


def _builder(**given: Any) -> StepBuilder:
    device = torch.device("cpu")
    return StepBuilder(max_batch_size=4, max_num_tokens=16, device=device, **given)


def _batch(mode: SglangMode, lens: list[int], num_tokens: int, **given: Any) -> SimpleNamespace:
    values = {
        "forward_mode": mode,
        "batch_size": len(lens),
        "req_pool_indices": torch.arange(1, len(lens) + 1),
        "seq_lens": torch.tensor(lens),
        "seq_lens_cpu": torch.tensor(lens),
        "out_cache_loc": torch.arange(1, num_tokens + 1),
        "extend_seq_lens": None,
        "extend_seq_lens_cpu": None,
        "spec_info": None,
        **given,
    }
    return SimpleNamespace(**values)


@pytest.mark.parametrize("masked", ["whole", "draft"])
def test_a_tree_is_verified_with_its_mask(masked: str) -> None:
    prefixes = torch.tensor(PREFIXES)
    whole = whole_mask(tree_visibility(PARENTS), prefixes)
    mask = whole if masked == "whole" else tree_visibility(PARENTS).flatten()
    spec = SimpleNamespace(draft_token_num=4, topk=2, custom_mask=mask)
    step = _builder().step(_batch(SglangMode.TARGET_VERIFY, PREFIXES, 8, spec_info=spec))
    assert step.forward_mode is ForwardMode.TARGET_VERIFY
    assert step.seq_lens.tolist() == PREFIXES == step.extend_prefix_lens.tolist()
    assert step.positions.tolist() == [5, 6, 7, 8, 3, 4, 5, 6]
    assert step.spec_info.mask_indptr.tolist() == [0, 36, 64]
    torch.testing.assert_close(step.spec_info.custom_mask, whole)


def test_a_chain_is_verified_without_a_mask() -> None:
    spec = SimpleNamespace(draft_token_num=4, topk=1, custom_mask=torch.ones(64, dtype=torch.bool))
    step = _builder().step(_batch(SglangMode.TARGET_VERIFY, PREFIXES, 8, spec_info=spec))
    assert step.spec_info.custom_mask is None
    assert step.extend_seq_lens.tolist() == [4, 4]


def test_a_draft_is_extended_by_what_it_may_accept() -> None:
    positions = torch.arange(8)
    lens = [9, 7]
    step = _builder().step(_batch(SglangMode.DRAFT_EXTEND_V2, lens, 8, positions=positions))
    assert step.forward_mode is ForwardMode.DRAFT_EXTEND
    assert step.extend_prefix_lens.tolist() == PREFIXES
    assert step.extend_seq_lens.tolist() == [4, 4]


@pytest.mark.parametrize("draft_step", [0, 2])
def test_a_step_of_a_draft_sees_the_steps_before_it(draft_step: int) -> None:
    step = _builder(draft_step=draft_step).step(_batch(SglangMode.DECODE, PREFIXES, 2))
    assert step.seq_lens.tolist() == [6 + draft_step, 4 + draft_step]
    assert step.seq_lens_cpu.tolist() == step.seq_lens.tolist()
    assert step.positions.tolist() == [5 + draft_step, 3 + draft_step]


def test_a_padded_step_writes_to_slot_0_and_keeps_its_addresses() -> None:
    builder = _builder()
    first = builder.step(_batch(SglangMode.DECODE, [5, 3, 1, 1], 4))
    padded = builder.step(_batch(SglangMode.DECODE, [6, 4, 1, 1], 2))
    assert padded.out_cache_loc.tolist() == [1, 2, 0, 0]
    assert padded.seq_lens.data_ptr() == first.seq_lens.data_ptr()
    assert padded.num_tokens == 4


def test_a_step_larger_than_the_buffers_runs() -> None:
    step = _builder().step(
        _batch(
            SglangMode.EXTEND,
            [30],
            25,
            extend_seq_lens=torch.tensor([25]),
            extend_seq_lens_cpu=[25],
        )
    )
    assert step.positions.tolist() == list(range(5, 30))
    assert step.extend_prefix_lens_cpu.tolist() == [5]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(InvalidInput, match="forward_mode: expected EXTEND"):
        _builder().step(_batch(SglangMode.DLLM_EXTEND, [1], 1))


def test_a_draft_tree_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="--speculative-draft-attention-backend"):
        AttnmuxMultiStepDraftBackend(SimpleNamespace(), topk=2, num_steps=3)


def test_sglangs_factory_of_drafts_knows_attnmux() -> None:
    """The hook that SGLang's registry calls, with a factory that asks for a tree."""
    factory = SimpleNamespace(draft_model_runner=SimpleNamespace(), topk=2, speculative_num_steps=3)

    def original(self: Any, name: str, known: dict[str, Any], *, stamps_children: bool) -> Any:
        assert set(known) == {"triton", "attnmux"}
        return known["attnmux"]()

    with pytest.raises(ValueError, match=r"--speculative-eagle-topk: expected 1 .*got 2"):
        plugin._with_drafts(
            original, factory, "decode_attention_backend", {"triton": None}, stamps_children=True
        )


def _runner(**given: Any) -> SimpleNamespace:
    values = {
        "dtype": torch.bfloat16,
        "kv_cache_dtype": torch.bfloat16,
        "page_size": 1,
        "sliding_window_size": None,
        "model_config": SimpleNamespace(hf_config={}, num_hidden_layers=2),
        "server_args": SimpleNamespace(enable_mis=False),
    }
    return SimpleNamespace(**{**values, **given})


SPEC = LayerSpec(
    layer_id=0,
    tp_q_head_num=8,
    tp_k_head_num=2,
    tp_v_head_num=2,
    qk_head_dim=64,
    v_head_dim=64,
    scaling=0.125,
)


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's resolved configuration, as of n-grams: the arguments leave the breadth open."""
    spec = SimpleNamespace(
        speculative_algorithm="NGRAM",
        speculative_eagle_topk=10,
        speculative_num_draft_tokens=12,
        speculative_attention_mode="prefill",
    )
    exact = SimpleNamespace(deterministic=SimpleNamespace(enable_deterministic_inference=True))
    monkeypatch.setattr(layers, "get_spec", lambda: spec)
    monkeypatch.setattr(layers, "get_exec", lambda: exact)
    monkeypatch.setattr(layers, "mambaish_config", lambda config: None)
    return spec


def test_drafts_and_determinism_are_those_that_sglang_resolved(configured: SimpleNamespace) -> None:
    request = asked(layers.request_of((SPEC,), _runner(), phases=()), captures=True)
    assert (request.spec_topk, request.spec_draft_tokens) == (10, 12)
    assert (request.custom_mask, request.deterministic, request.graph) == (True, True, True)
    assert request.phases == ("extend", "decode", "verify", "draft")
    configured.speculative_algorithm = None
    request = asked(layers.request_of((SPEC,), _runner(), phases=()), captures=False)
    assert (request.spec_topk, request.spec_draft_tokens, request.graph) == (None, None, False)


@pytest.mark.parametrize(
    ("specs", "changes", "said"),
    [
        ((SPEC,), {"sliding_window_size": 0}, "sliding_window: expected 2 tokens or more"),
        ((SPEC, replace(SPEC, layer_id=1, tp_k_head_num=4, tp_v_head_num=4)), {}, "other_layers"),
        (
            (SPEC,),
            {
                "model_config": SimpleNamespace(
                    hf_config={"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048}
                )
            },
            "kind: expected mha or mla: .*got nsa",
        ),
    ],
)
def test_what_a_request_states_and_the_bridge_refuses(
    specs: Any, changes: Any, said: str, configured: SimpleNamespace
) -> None:
    configured.speculative_algorithm = None
    with pytest.raises(InvalidInput, match=said):
        asked(layers.request_of(specs, _runner(**changes), phases=()), captures=True)


def test_recurrent_layers_are_refused(
    configured: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    configured.speculative_algorithm = None
    monkeypatch.setattr(layers, "mambaish_config", lambda config: config)
    with pytest.raises(InvalidInput, match=r"linear_layers: .* got 1 of recurrent"):
        asked(layers.request_of((SPEC,), _runner(), phases=()), captures=True)


@pytest.mark.parametrize("adjusted", [True, False])
def test_models_for_which_sglang_lists_backends_meet_one_that_is_listed(adjusted: bool) -> None:
    given = SimpleNamespace(attention_backend="attnmux", prefill_attention_backend=None, tp_size=2)
    token = plugin.ADJUSTED.set(adjusted)
    try:
        view = plugin._as_listed(lambda args: args, given)
    finally:
        plugin.ADJUSTED.reset(token)
    assert view.attention_backend == ("triton" if adjusted else "attnmux")
    assert (view.prefill_attention_backend, view.tp_size) == (None, 2)


def test_attention_is_written_where_the_next_piece_reads() -> None:
    """Between the graphs of a prompt's pieces SGLang says where."""
    sizes = {"tp_q_head_num": 2, "tp_k_head_num": 1, "tp_v_head_num": 1}
    spec = LayerSpec(layer_id=3, qk_head_dim=4, v_head_dim=4, scaling=0.5, **sizes)

    def attend(q: torch.Tensor, *_: Any, out: torch.Tensor | None, **__: Any) -> torch.Tensor:
        return torch.ones_like(q) if out is None else out.fill_(2)

    backend = object.__new__(AttnmuxAttnBackend)
    vars(backend).update(
        _specs={3: spec},
        _batch=SimpleNamespace(),
        backend=SimpleNamespace(forward=attend),
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _: None),
    )
    q, k = torch.zeros(5, 8), torch.zeros(5, 4)
    mode = SimpleNamespace(is_idle=lambda: False)
    layer = SimpleNamespace(layer_id=3)
    for written in (None, torch.zeros(5, 8)):
        step = SimpleNamespace(forward_mode=mode, _attn_output=written)
        out = backend.forward(q, k, k, layer, step)
        assert out.shape == (5, 8)
        assert bool((out == (1 if written is None else 2)).all())
        assert written is None or out.data_ptr() == written.data_ptr()


@pytest.mark.parametrize("scales", [False, True])
def test_a_model_that_scales_q_by_position_passes_it_whole(
    scales: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_parts: list[str] = []
    monkeypatch.setattr(latent, "FORWARD_ABSORB_CORE_ATTENTION_BACKENDS", in_parts)
    config = SimpleNamespace(llama_4_scaling={"beta": 0.1} if scales else None)
    runner = SimpleNamespace(model_config=SimpleNamespace(hf_config=config))
    for _ in range(2):
        latent.serve_latent("attnmux", runner)
    assert in_parts == ([] if scales else ["attnmux"])


def test_a_window_pools_table_is_sglangs_own() -> None:
    table = torch.tensor([0, 3, 1, -1])
    theirs = SimpleNamespace(full_to_swa_index_mapping=table)
    full, swa = (
        MHATokenToKVPool(
            size=4,
            page_size=1,
            layer_ids=[number],
            num_kv_heads=1,
            head_dim=2,
            dtype=torch.float32,
            device="cpu",
        )
        for number in (0, 1)
    )
    pool = SglangWindowPool(theirs, full=full, swa=swa)
    assert pool.slot_map(0) is None
    assert pool.slot_map(1) is table
    assert pool.translate(torch.tensor([1, 2]), 1).tolist() == [3, 1]
