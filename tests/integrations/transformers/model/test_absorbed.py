"""Latent attention on the latent: the logits of the expanded model from a small KV cache."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from attnmux.core import InvalidInput, MHATokenToKVPool, MLATokenToKVPool, NoBackend, Offer, Policy
from attnmux.core.find.cpu import probe_cpu
from attnmux.core.plugin import ANY, BackendCard, Clause, Prior, one_of
from attnmux.parts import merge_into
from attnmux.transformers import (
    RunnerOptions,
    SequenceState,
    load_runner,
    open_checkpoint,
    record_layers,
)
from attnmux.transformers.load.checkpoint import quiet_transformers
from attnmux.transformers.model.absorbed import UpProjection, absorb, absorbed_layers, expand
from attnmux.transformers.model.attention import SERVED
from attnmux.transformers.requests.pools import bytes_per_token

OP = torch.ops.attnmux.attention_with_output

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
    "beta_fast": 32,
    "beta_slow": 1,
}
V2 = {**BASE, **EXPERTS, "topk_method": "greedy"}
V3 = {**BASE, **EXPERTS, "q_lora_rank": 24}
CONFIGS = {
    "v2": lambda: transformers.DeepseekV2Config(**V2, q_lora_rank=None),
    "v2-low-rank-q": lambda: transformers.DeepseekV2Config(**V2, q_lora_rank=24),
    "v2-yarn": lambda: transformers.DeepseekV2Config(**V2, q_lora_rank=24, rope_parameters=YARN),
    "v3": lambda: transformers.DeepseekV3Config(**V3),
    "v3-halves": lambda: transformers.DeepseekV3Config(**V3, rope_interleave=False),
    "v3-yarn": lambda: transformers.DeepseekV3Config(**V3, rope_parameters=YARN),
    "v3-whole-heads": lambda: transformers.DeepseekV3Config(
        **{**V3, "kv_lora_rank": 2 * 28}  # as in the large models: nothing is filled up
    ),
    "v3-one-head-is-wider": lambda: transformers.DeepseekV3Config(**{**V3, "kv_lora_rank": 6}),
    "longcat": lambda: transformers.LongcatFlashConfig(
        vocab_size=97,
        hidden_size=32,
        ffn_hidden_size=48,
        expert_ffn_hidden_size=16,
        num_layers=2,
        num_hidden_layers=4,
        num_attention_heads=4,
        q_lora_rank=24,
        kv_lora_rank=40,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
        head_dim=8,
        n_routed_experts=4,
        zero_expert_num=1,
        moe_topk=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    ),
}
PROMPT_LENS = (13, 1, 33)
NUM_DECODED = 4


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(the model with transformers' own eager attention, its checkpoint's folder), by name."""
    known = {}

    def make(name):
        if name not in known:
            torch.manual_seed(0)
            with quiet_transformers(progress=False):
                model = AutoModelForCausalLM.from_config(
                    CONFIGS[name](), attn_implementation="eager"
                ).eval()
                with torch.no_grad():
                    for parameter in model.parameters():
                        if parameter.dim() > 1:
                            parameter.normal_(0, 0.3)
                folder = tmp_path_factory.mktemp(name)
                model.save_pretrained(folder)
            known[name] = model, folder
        return known[name]

    return make


@pytest.fixture
def sequences():
    generator = torch.Generator().manual_seed(1)
    lens = [length + NUM_DECODED for length in PROMPT_LENS]
    return [torch.randint(97, (length,), generator=generator).tolist() for length in lens]


def eager_logits(model, sequences):
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([ids])).logits[0] for ids in sequences]


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.turns(3)
def test_chunks_and_decode_give_the_expanded_models_logits(
    made, run_on, sequences, name, page_size
):
    """The second extend stands on a prefix of one, several or no pages."""
    model, folder = made(name)
    runner = run_on(folder, page_size=page_size, mla="absorbed")
    assert type(runner.context.token_to_kv_pool) is MLATokenToKVPool
    theirs = eager_logits(model, sequences)
    states = [
        SequenceState(token_ids=ids[:length])
        for ids, length in zip(sequences, PROMPT_LENS, strict=True)
    ]
    ours = [[], [], []]
    for chosen, counts in (((0, 2), (5, 20)), ((0, 1, 2), (8, 1, 13))):
        step = runner.steps.extend([states[one] for one in chosen], counts)
        parts = runner.forward(step, torch.arange(sum(counts))).split(counts)
        for one, part in zip(chosen, parts, strict=True):
            ours[one].append(part)
    for parts, other, length in zip(ours, theirs, PROMPT_LENS, strict=True):
        assert_same(torch.cat(parts), other[:length])
    for _ in range(NUM_DECODED):
        for state, ids in zip(states, sequences, strict=True):
            state.token_ids.append(ids[len(state.token_ids)])
        expected = [
            other[len(state.token_ids) - 1] for state, other in zip(states, theirs, strict=True)
        ]
        assert_same(runner.decode(states), torch.stack(expected))
    runner.release(states)
    assert runner.steps.allocator.available_size() == runner.context.token_to_kv_pool.size


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["v2", "v3-yarn", "v3-whole-heads"])
def test_a_long_prompt_runs_expanded_after_its_cached_prefix(
    made, run_on, name, page_size, monkeypatch
):
    model, folder = made(name)
    runner = run_on(folder, page_size=page_size, mla="absorbed", max_context_len=120)
    assert runner.decision.answer("expanded_prompts", "prompts", "extend") is not None
    merged = []
    monkeypatch.setattr(
        "attnmux.parts.part_attention.merge_into",
        lambda *given: merged.append(merge_into(*given)),
    )
    ids = torch.randint(97, (100,), generator=torch.Generator().manual_seed(2)).tolist()
    (theirs,) = eager_logits(model, [ids])
    state = SequenceState(token_ids=ids)
    for first, last in ((0, 40), (40, 100)):
        step = runner.steps.extend([state], (last - first,))
        assert_same(runner.forward(step, torch.arange(last - first)), theirs[first:last])
        assert len(merged) == (3 if first else 0)


def greedy(runner, prompts, max_new_tokens):
    states = [SequenceState(token_ids=list(ids)) for ids in prompts]
    logits = runner.extend(states)
    for _ in range(max_new_tokens):
        for state, token in zip(states, logits.argmax(-1).tolist(), strict=True):
            state.token_ids.append(token)
        logits = runner.decode(states)
    return [state.token_ids[len(ids) :] for state, ids in zip(states, prompts, strict=True)]


@pytest.mark.parametrize("name", ["v2", "v3-yarn"])
def test_greedy_text_is_that_of_the_expanded_run_and_of_transformers(made, run_on, name):
    model, folder = made(name)
    prompts = [list(range(1, 12)), [5], list(range(20, 55))]
    texts = {
        mla: greedy(run_on(folder, mla=mla, page_size=16), prompts, 8)
        for mla in ("absorbed", "expanded")
    }
    assert texts["absorbed"] == texts["expanded"]
    for ids, text in zip(prompts, texts["absorbed"], strict=True):
        whole = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
        assert text == whole[0, len(ids) :].tolist()


def test_absorbed_by_default_and_the_request_says_mla(made, run_on):
    runner = run_on(made("v3")[1])
    request = runner.decision.request
    assert (request.kind, request.num_q_heads, request.num_kv_heads) == ("mla", 4, 1)
    assert (request.head_dim, request.v_head_dim) == (24, 12)
    assert (request.kv_lora_rank, request.qk_rope_head_dim) == (40, 8)
    assert request.origins["kind"] == "model"
    assert bytes_per_token(runner.context.layers, runner.decision) == 3 * (40 + 8) * 4


def test_expanded_on_demand(made, run_on):
    runner = run_on(made("v3")[1], mla="expanded")
    request = runner.decision.request
    assert (request.kind, request.num_kv_heads) == ("mha", 4)
    assert (request.head_dim, request.v_head_dim) == (24, 12)
    assert type(runner.context.token_to_kv_pool) is MHATokenToKVPool
    assert bytes_per_token(runner.context.layers, runner.decision) == 3 * 4 * (24 + 12) * 4


def test_the_weights_are_views_of_the_models(made, run_on):
    model, folder = made("v3")
    runner = run_on(folder)
    for name, theirs in model.state_dict().items():
        torch.testing.assert_close(runner.model.state_dict()[name], theirs, atol=0, rtol=0)
    weight = runner.model.model.layers[0].self_attn.kv_b_proj.weight
    projection = UpProjection.of(weight, num_heads=4, v_head_dim=12)
    assert (projection.w_uk.shape, projection.w_uv.shape) == ((4, 16, 40), (4, 12, 40))
    for part in (projection.w_uk, projection.w_uv):
        assert part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def offer_for(*kinds, name="partial", rank=100):
    """A backend that serves these kinds, with that rank."""
    anything = dict.fromkeys(
        ("dtype", "kv_dtype", "page_size", "head_dim", "v_head_dim", "kv_lora_rank"), ANY
    )
    card = BackendCard(
        name=name,
        summary="serves some kinds",
        factory="attnmux.cpu.torch_native:TorchNativeBackend",
        clauses=(
            Clause(
                vendor=ANY,
                phase=one_of("extend", "decode"),
                kind=one_of(*kinds),
                qk_rope_head_dim=ANY,
                **anything,
            ),
        ),
        priors=(Prior(rank=rank, source="a test"),),
    )
    return Offer(card=card, plugin="some", distribution="attnmux-some", version="1.0")


def load(folder, *offers, **changes):
    warned = []
    given = {"max_batch_size": 2, "max_context_len": 64, "max_total_tokens": 128, **changes}
    runner = load_runner(
        open_checkpoint(folder), probe_cpu(), offers, RunnerOptions(**given), warn=warned.append
    )
    return runner, warned


def test_where_no_backend_serves_it_the_model_runs_expanded_and_says_so(made):
    folder = made("v3")[1]
    runner, warned = load(folder, offer_for("mha"))
    assert runner.decision.request.kind == "mha"
    (warning,) = warned
    assert "1,728 bytes" in warning
    assert "576" in warning
    runner, warned = load(folder, offer_for("mha", "mla"))
    assert runner.decision.request.kind == "mla"
    assert not warned
    assert not load(folder, offer_for("mha"), mla="expanded")[1]
    with pytest.raises(NoBackend, match="kind"):
        load(folder, offer_for("mha"), mla="absorbed")
    with pytest.raises(NoBackend, match="kind"):
        load(folder, offer_for("gdn"))


def test_a_last_resort_for_the_latent_is_not_preferred_to_a_kernel_for_heads(made):
    folder = made("v3")[1]
    slow, fast = (
        offer_for("mla", "mha", rank=Prior.LAST_RESORT),
        offer_for("mha", name="fast", rank=10),
    )
    runner, warned = load(folder, slow, fast)
    assert runner.decision.request.kind == "mha"
    assert runner.decision.phases["decode"].backend == "fast"
    (warning,) = warned
    assert "mla=absorbed" in warning
    for changes in ({"mla": "absorbed"}, {"policy": Policy(backend="partial")}):
        runner, warned = load(folder, slow, fast, **changes)
        assert runner.decision.request.kind == "mla"
        assert not warned
    assert load(folder, slow)[0].decision.request.kind == "mla"
    faster = offer_for("mla", name="latent", rank=Prior.LAST_RESORT - 1)
    assert load(folder, slow, fast, faster)[0].decision.request.kind == "mla"


def test_a_model_without_a_latent_cannot_be_absorbed(tiny):
    folder = tiny("llama")[1]
    assert not load(folder, offer_for("mha"))[1]
    with pytest.raises(InvalidInput, match="kv_b_proj"):
        load(folder, offer_for("mha", "mla"), mla="absorbed")


def recorded(name):
    torch.manual_seed(0)
    with quiet_transformers(progress=False):
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=SERVED).eval()
    return model, record_layers(model, max_context_len=64)


def test_only_what_a_plain_kv_b_proj_explains_is_absorbed():
    model, layers = recorded("v3")
    assert absorbed_layers(model, layers) is not None
    attention = model.model.layers[1].self_attn
    hook = attention.kv_b_proj.register_forward_hook(lambda module, args, out: out.flip(-1))
    assert absorbed_layers(model, layers) is None
    hook.remove()
    assert absorbed_layers(model, layers) is not None

    class Quantised(torch.nn.Linear):
        pass

    for other in (Quantised(40, 4 * 28, bias=False), torch.nn.Linear(40, 4 * 28)):
        attention.kv_b_proj = other
        assert absorbed_layers(model, layers) is None


def test_looking_leaves_the_model_as_it_was_and_so_does_expanding_again():
    model, layers = recorded("v3")
    latent = absorbed_layers(model, layers)
    assert {layer.kind for layer in latent} == {"mla"}
    assert model.config._attn_implementation == SERVED
    assert not [module for module in model.modules() if "forward" in vars(module)]
    absorb(model, layers)
    expand(model, layers)
    assert model.config._attn_implementation == SERVED
    assert not [module for module in model.modules() if "forward" in vars(module)]
    again = record_layers(model, max_context_len=64)
    assert [layer.qk_head_dim for layer in again] == [24, 24, 24]


def test_an_absorbed_model_compiles_as_one_graph(made, run_on):
    torch._dynamo.reset()
    runner = run_on(made("v3")[1], page_size=16, debug=False)
    state = SequenceState(token_ids=list(range(1, 20)))
    plain = runner.extend([state])
    runner.release([state])
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph.forward

    # transformers' own loop over the experts breaks the graph.
    runner.model = torch.compile(runner.model, backend=keep)
    torch.testing.assert_close(runner.extend([state]), plain, atol=1e-5, rtol=1e-5)
    calls = [node for graph in graphs for node in graph.graph.nodes if node.target is OP]
    assert len(calls) == 3
    torch._dynamo.reset()
