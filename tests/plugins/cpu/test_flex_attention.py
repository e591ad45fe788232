"""flex_attention on a CPU.

Each shape takes seconds to compile. The whole suite runs with an emulator of the kernel; with the
kernel it runs at page size 16, and a few cases of the others: `attnmux verify flex_attention` runs
all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import fresh_cache

from attnmux.core import (
    AttentionBackend,
    AttnmuxError,
    BackendContext,
    BackendFailed,
    GraphUnsupported,
    InvalidInput,
    MHATokenToKVPool,
    SpecInput,
)
from attnmux.core.plugin import ANY, one_of
from attnmux.cpu.flex_attention import FlexAttentionBackend
from attnmux.cpu.flex_attention.kernel import kernel
from attnmux.cpu.flex_attention.plan import Plan
from attnmux.emulators.flex_attention import emulated
from attnmux.testing import (
    AttentionBackendTests,
    Case,
    CaseSetup,
    Step,
    decode,
    extend,
    find_candidate,
    make_setup,
    prepare_step,
    run_case,
    verify,
)

WHOLE = find_candidate("flex_attention", device="cpu")
RUNS_HERE = {"cxx_compiler", "avx2"} <= WHOLE.platform.features
OF_OTHER_PAGES = (
    "decode-uneven-page1",
    "decode-uneven-page64",
    "extend-prefix-page64",
    "encoder-page1",
    "encoder-nan-page1",
)
RARE = (
    *("8x1", "8x8", "14x2", "16x2", "128-heads", "dim-64", "dim-256", "mla-verify", "expanded"),
    *("float16", "unsaved-long", "mla-extend-empty", "strided-decode-long", "strided-mla-extend"),
    *("unscaled", "host-lens"),
)
"""Cases that differ from others by a number or a dtype alone, or by how the plan gets its lengths,
which `TestEmulated` runs: the compiler sees the same."""
NAN: dict[str, Any] = {"nan_request": 1, "page_size": 16}
CROSS = extend((0, 5), (0, 9), (7, 3), encoder=(12, 4, 30))
WITH_NAN = (
    Case(
        name="window-pool",
        steps=(decode(45, 17, 3), decode(20, 31, 5)),
        windows=(None, 8),
        window_pool=True,
        **NAN,
    ),
    Case(name="cross", steps=(CROSS, CROSS.varied(128)), **NAN),
)
"""Cases of `test_nan` that are not in the suite."""


def emulating(context: BackendContext, options: Mapping[str, Any]) -> AttentionBackend:
    return FlexAttentionBackend(context, options, kernels=emulated)


ON_GPU = tuple(
    replace(
        clause,
        vendor=ANY,
        version=ANY,
        kind=one_of("mha", "mla"),
        kv_lora_rank=ANY,
        qk_rope_head_dim=ANY,
        head_dim=ANY,
        v_head_dim=ANY,
    )
    for clause in WHOLE.card.clauses
    if not clause.vendor.admits("cpu")
)


class TestEmulated(AttentionBackendTests):
    """The features that a GPU adds (LSE, sinks, graphs), with plain torch as the kernel."""

    backend = replace(WHOLE, card=replace(WHOLE.card, clauses=ON_GPU), factory=emulating)
    page_sizes = (1, 16)


@pytest.mark.turns(32)
class TestFlexAttention(AttentionBackendTests):
    backend = WHOLE

    def wants(self, case: Case) -> bool:
        """The cases that there is time for."""
        if case.name in OF_OTHER_PAGES:
            return True
        return case.name.endswith("-page16") and not any(rare in case.name for rare in RARE)


pytestmark = pytest.mark.skipif(not RUNS_HERE, reason="needs a C++ compiler and AVX2")


def announced(
    context: BackendContext, options: Mapping[str, Any], **kernels: Any
) -> AttentionBackend:
    """A backend that plans decode and verify in the buffers of graphs."""
    backend = FlexAttentionBackend(context, options, **kernels)
    backend.init_cuda_graph_state(max_bs=8, max_num_tokens=48)
    return backend


def planning(context: BackendContext) -> AttentionBackend:
    """A backend that compiles nothing, for tests that run no kernel."""
    return FlexAttentionBackend(context, kernels=emulated)


def world_of(*steps: Step, **of_case: Any) -> CaseSetup:
    of_case = {"page_size": 16, "max_context_len": 512, **of_case}
    case = Case(name="of-this-test", steps=steps, **of_case)
    return make_setup(case, WHOLE.platform, "cpu")


def attend(setup: CaseSetup, backend: AttentionBackend, step: Step) -> list[torch.Tensor]:
    """The output of each layer."""
    prepared = prepare_step(setup, step)
    backend.init_forward_metadata(prepared.batch)
    return [
        backend.forward(given.q, given.k, given.v, given.layer, prepared.batch)
        for given in prepared.inputs
    ]


def plan_of(step: Step, **of_case: Any) -> Plan:
    """The arguments of the first layer's kernel in a step."""
    setup = world_of(step, windows=(of_case.pop("window", None),), **of_case)
    backend = planning(setup.context)
    backend.init_forward_metadata(prepare_step(setup, step).batch)
    (plan,) = backend.plans
    return plan


def blocks_of(plan: Plan) -> int:
    """Blocks that all tiles read."""
    assert plan.given.num_whole is not None
    return int(plan.given.num_partial.sum() + plan.given.num_whole.sum())


@pytest.mark.parametrize("case", WITH_NAN, ids=lambda case: case.name)
@pytest.mark.turns(2)
def test_nan_stays_within_a_request(case: Case) -> None:
    outcome = run_case(WHOLE, case)
    assert outcome.status == "passed", (outcome.message, outcome.reasons)


@settings(max_examples=5, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=4),
    page_size=st.sampled_from((3, 16, 48)),
    window=st.sampled_from((None, 0, 5, 30)),
    chunk=st.sampled_from((None, 8)),
    decodes=st.booleans(),
)
def test_any_lengths(full, requests, page_size, window, chunk, decodes):
    page_size = page_size if full else min(page_size, 16)  # each compiles two kernels
    step = decode(*(sum(request) for request in requests)) if decodes else extend(*requests)
    case = Case(
        name="any-lengths",
        steps=(step,),
        page_size=page_size,
        windows=(window, None),
        attention_chunk=chunk,
    )
    outcome = run_case(WHOLE, case)
    assert outcome.status == "passed", outcome.message


def test_steps_of_a_bucket_are_compiled_once():
    # A library that registers a pytree node makes code invalid that earlier tests compiled
    kernel.cache_clear()
    torch.compiler.reset()
    steps = [decode(40, 3), decode(300), decode(*range(1, 9))]
    steps += [extend((0, 60)), extend((200, 9), (16, 30), (3, 1)), extend((0, 1))]
    setup = world_of(*steps, kv_in_pool=True)
    backend = FlexAttentionBackend(setup.context)
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in steps:
            attend(setup, backend, step)
        with torch.inference_mode():
            attend(setup, backend, steps[0])
        with torch.enable_grad():
            attend(setup, backend, steps[0])
        another = world_of(decode(500, 490, 480), kv_in_pool=True)
        attend(another, FlexAttentionBackend(another.context), decode(500, 490, 480))


def test_what_compiles_after_a_reset_serves_pools_of_any_size():
    step = decode(40, 3)
    (one, first), (other, second) = (
        (setup, FlexAttentionBackend(setup.context))
        for setup in (world_of(step, kv_in_pool=True), world_of(decode(500, 490), kv_in_pool=True))
    )
    torch.compiler.reset()
    attend(one, first, step)
    with torch.compiler.set_stance("fail_on_recompile"):
        attend(other, second, decode(500, 490))


def test_keys_are_read_where_they_lie():
    step = extend((40, 9), (0, 30))
    setup = world_of(step)
    attend(setup, FlexAttentionBackend(setup.context), step)
    assert setup.context.workspace.nbytes == 0


def test_keys_of_small_pages_are_gathered_to_blocks_of_64():
    step = extend((60, 9), (0, 30))
    setup = world_of(step, page_size=1, windows=(None, None))
    attend(setup, FlexAttentionBackend(setup.context), step)
    slot_bytes = 2 * setup.case.num_kv_heads * setup.case.head_dim * 2
    assert setup.context.workspace.nbytes == 3 * 64 * slot_bytes


def test_masked_blocks_are_not_read():
    assert blocks_of(plan_of(decode(400))) == 25
    assert blocks_of(plan_of(decode(400), window=16)) == 2
    assert blocks_of(plan_of(decode(400), attention_chunk=100)) == 7
    # 50 tiles of 8 queries: two see blocks 1 … n, the next two n + 1.
    causal = plan_of(extend((0, 400)))
    assert causal.given.first.shape[1] == 8
    assert blocks_of(causal) == 2 * sum(range(1, 26))
    assert blocks_of(plan_of(extend((0, 400)), window=16)) <= 50 * 3


def test_only_edges_are_masked():
    given = plan_of(decode(400, 399)).given
    assert given.num_whole is not None
    assert given.num_partial.flatten()[:2].tolist() == [0, 1]
    assert given.num_whole.flatten()[:2].tolist() == [25, 24]


@pytest.mark.parametrize(
    "name", ["decode-padding", "decode-window", "decode-cross", "verify-chain"]
)
def test_plans_in_buffers_of_graphs(name):
    candidate = replace(WHOLE, factory=announced)
    (case,) = [case for case in candidate.cases() if case.name == f"{name}-page16"]
    outcome = run_case(candidate, case)
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize(
    "steps", [(decode(9, 40, 1), decode(30, 2, 2)), (verify(4, 9), verify(4, 200))]
)
def test_buffers_of_graphs_stay_where_they_are(steps):
    setup = world_of(steps[1])
    backend = announced(setup.context, {}, kernels=emulated)
    addresses = []
    for step in steps:
        backend.init_forward_metadata_out_graph(prepare_step(setup, step).batch, in_capture=True)
        (plan,) = backend.plans
        given = plan.given
        tensors = (plan.tokens, plan.places, given.columns, given.first, given.end)
        tensors += (given.num_partial, given.partial, given.num_whole, given.whole)
        addresses.append([(tensor.data_ptr(), tensor.shape) for tensor in tensors])
    assert addresses[0] == addresses[1]


def test_what_graphs_cannot_hold_is_refused():
    step = decode(3)
    setup = world_of(step, page_size=1)
    with pytest.raises(GraphUnsupported, match="multiple of 16"):
        planning(setup.context).init_cuda_graph_state(1, 1)
    setup = world_of(step)
    backend = announced(setup.context, {}, kernels=emulated)
    batch = prepare_step(setup, extend((0, 4))).batch
    with pytest.raises(GraphUnsupported, match="DECODE"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


def test_a_compiler_that_fails_is_a_reason():
    setup = world_of(decode(3), head_dim=40, v_head_dim=40)
    missing = torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, fresh_cache(), pytest.raises(BackendFailed, match="no-such-compiler") as failed:
        FlexAttentionBackend(setup.context)
    assert "flex_attention cannot run here" in str(failed.value)


@pytest.mark.parametrize("change", [lambda mask: mask[:-1], lambda mask: mask.int()])
def test_a_mask_that_does_not_fit_is_refused(change):
    step = verify(4, 9)
    setup = world_of(step, spec_topk=4)
    batch = prepare_step(setup, step).batch
    mask = change(batch.spec_info.custom_mask)
    object.__setattr__(batch, "spec_info", SpecInput(draft_token_num=4, topk=4, custom_mask=mask))
    with pytest.raises(InvalidInput, match="custom_mask"):
        planning(setup.context).init_forward_metadata(batch)


def test_forward_needs_a_prepared_step():
    step = decode(3)
    setup = world_of(step)
    prepared, backend = prepare_step(setup, step), planning(setup.context)
    one = prepared.inputs[0]
    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        backend.forward(one.q, one.k, one.v, one.layer, prepared.batch)


@pytest.mark.parametrize(("slots", "is_refused"), [(2**20 - 1, False), (2**20, True)])
def test_a_gpu_s_pool_of_2_31_elements_is_refused(slots, is_refused):
    """torch's kernel would multiply slots by strides in int32. A CPU's does not."""
    case = Case(name="large", steps=(decode(5),), num_kv_heads=8, head_dim=256, v_head_dim=256)
    gpu, cpu = (make_setup(case, WHOLE.platform, device).context for device in ("meta", "cpu"))
    layer_ids = [layer.layer_id for layer in cpu.layers]
    # Slot 0 is reserved
    pool = MHATokenToKVPool(
        size=slots - 1,
        page_size=1,
        dtype=torch.bfloat16,
        layer_ids=layer_ids,
        num_kv_heads=8,
        head_dim=256,
        device="meta",
    )
    assert pool.get_kv_buffer(layer_ids[0])[0].numel() == slots * 2048
    kernels = {"kernels": lambda spec: None}
    FlexAttentionBackend(replace(cpu, token_to_kv_pool=pool), **kernels)
    context = replace(gpu, token_to_kv_pool=pool)
    if not is_refused:
        FlexAttentionBackend(context, **kernels)
        return
    with pytest.raises(BackendFailed, match=r"K of layer 1 has 2,147,483,648 elements.*smaller"):
        FlexAttentionBackend(context, **kernels)
