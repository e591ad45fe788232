"""FlashInferBackend on the emulator of the library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from attnmux.core.batch import ForwardMode, MultiItem
from attnmux.core.choosing.card import Offer
from attnmux.core.choosing.options import complete
from attnmux.core.choosing.platform import Platform
from attnmux.core.choosing.request import Request
from attnmux.core.choosing.solver import Policy, solve
from attnmux.core.errors import AttnmuxError, BackendFailed, GraphUnsupported, InvalidInput
from attnmux.core.graph.config import GraphConfig
from attnmux.core.graph.runner import GraphRunner
from attnmux.emulators.nvidia import flashinfer as emulator
from attnmux.nvidia.cards.flashinfer import FLASHINFER
from attnmux.nvidia.flashinfer.backend import FlashInferBackend
from attnmux.nvidia.flashinfer.groups import plan_groups
from attnmux.nvidia.flashinfer.items import LONGEST, lay_out
from attnmux.nvidia.flashinfer.kernels import Kernels, SinkVariant
from attnmux.nvidia.flashinfer.settings import (
    MIB,
    graph_plan_bytes,
    graph_workspace_bytes,
    read_settings,
)
from attnmux.nvidia.flashinfer.staging import Staging
from attnmux.testing import (
    AttentionBackendTests,
    Candidate,
    Case,
    World,
    make_world,
    prepare_step,
    reference,
    run_case,
)
from attnmux.testing.cases import Step, decode, extend, verify
from attnmux.testing.recording import RecordingGraphs

EMULATED = Kernels(
    decode=emulator.BatchDecodeWithPagedKVCacheWrapper,
    paged=emulator.BatchPrefillWithPagedKVCacheWrapper,
    ragged=emulator.BatchPrefillWithRaggedKVCacheWrapper,
    merge_state_in_place=emulator.merge_state_in_place,
    fast_decode_plan=emulator.fast_decode_plan,
    sinks=SinkVariant(
        source=emulator.attention_sink_decl["fa2"],
        module_name=emulator.get_batch_prefill_attention_sink_uri,
    ),
)

CANDIDATE = Candidate(
    card=replace(FLASHINFER, requires=()),
    platform=Platform.parse("nvidia:sm90,cuda=13.0"),
    device="cpu",
    factory=lambda context, options: FlashInferBackend(context, options, EMULATED),
)


UNEVEN = extend((0, 7), (9, 3))


class TestFlashInferEmulated(AttentionBackendTests):
    backend = CANDIDATE
    page_sizes = (1, 16)


@dataclass
class Spy:
    """The emulator, with a list of what was made, planned and run."""

    calls: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    @property
    def kernels(self) -> Kernels:
        return Kernels(
            decode=self._spied("decode", EMULATED.decode),
            paged=self._spied("paged", EMULATED.paged),
            ragged=self._spied("ragged", EMULATED.ragged),
            merge_state_in_place=self._noted("merge", EMULATED.merge_state_in_place),
            fast_decode_plan=self._noted("fast", EMULATED.fast_decode_plan),
            sinks=EMULATED.sinks,
        )

    def clear(self) -> None:
        self.calls.clear()

    @property
    def counts(self) -> Counter[str]:
        return Counter(f"{kind}.{method}" for kind, method, _ in self.calls)

    def keywords(self, kind: str, method: str, name: str) -> list[Any]:
        return [given[name] for k, m, given in self.calls if (k, m) == (kind, method)]

    def _noted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, "call", kwargs))
            return function(*args, **kwargs)

        return noted

    def _spied(self, kind: str, wrapper: type) -> Callable[..., Any]:
        calls = self.calls

        class Spied(wrapper):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                calls.append((kind, "make", kwargs))
                super().__init__(*args, **kwargs)

            def plan(self, *args: Any, **kwargs: Any) -> None:
                calls.append((kind, "plan", kwargs))
                super().plan(*args, **kwargs)

            def run(self, *args: Any, **kwargs: Any) -> Any:
                calls.append((kind, "run", kwargs))
                return super().run(*args, **kwargs)

        return Spied


@pytest.fixture
def spy() -> Spy:
    return Spy()


def world_of(*steps: Step, **settings: Any) -> World:
    case = Case(name="of-this-test", steps=steps, max_context_len=64, **settings)
    return make_world(case, CANDIDATE.platform, "cpu")


def options(**given: Any) -> Any:
    return complete(FLASHINFER, given)


def run_steps(spy: Spy, *steps: Step, **settings: Any) -> None:
    """Run eagerly, as the suite would; only what the steps call is in the spy afterwards."""
    world = world_of(*steps, **settings)
    backend = FlashInferBackend(world.context, options(), spy.kernels)
    spy.clear()
    for step in steps:
        prepared = prepare_step(world, step, host_lens=True)
        backend.init_forward_metadata(prepared.batch)
        for given in prepared.inputs:
            backend.forward(
                given.q, given.k, given.v, given.layer, prepared.batch, prepared.save_kv_cache
            )


def test_extend_without_a_prefix_reads_the_calls_keys(spy) -> None:
    run_steps(spy, extend((0, 7), (0, 3)))
    assert spy.counts == {"ragged.plan": 1, "ragged.run": 2}
    assert spy.keywords("ragged", "plan", "causal") == [True]


def test_a_prefix_is_merged_by_lse(spy) -> None:
    run_steps(spy, UNEVEN)
    assert spy.counts["merge.call"] == spy.counts["ragged.run"] == spy.counts["paged.run"] == 2
    assert spy.keywords("paged", "plan", "causal") == [False]
    assert spy.keywords("ragged", "plan", "causal") == [True]


@pytest.mark.parametrize(
    "settings",
    [
        {"windows": (8, None)},
        {"kv_dtype": "fp8_e4m3"},
        {"kv_in_pool": True},
    ],
    ids=["window", "quantised", "nothing-given"],
)
def test_other_extends_read_the_pool(spy, settings) -> None:
    run_steps(spy, UNEVEN, **settings)
    assert spy.counts["paged.run"] == 2
    assert not spy.counts["ragged.run"]
    assert not spy.counts["merge.call"]


def test_cross_attention_reads_the_pool_and_is_not_causal(spy) -> None:
    run_steps(spy, extend((0, 5), (0, 3), encoder=(12, 4)))
    assert spy.counts["paged.plan"] == 2
    assert spy.keywords("paged", "plan", "causal") == [True, False]
    assert not spy.counts["ragged.run"]


def test_cross_attention_has_no_window(spy) -> None:
    step = extend((0, 5), (0, 3), encoder=(12, 4))
    run_steps(spy, step, windows=(4, 4))
    assert spy.keywords("paged", "plan", "window_left") == [4, -1]
    outcome = run_case(CANDIDATE, Case(name="window", steps=(step,), windows=(4, 4)))
    assert outcome.status == "passed", outcome.message


def test_windows_have_a_plan_each_and_layers_share_it(spy) -> None:
    run_steps(spy, decode(5, 30), windows=(8, None, 21, 8))
    assert spy.counts == {"decode.plan": 3, "decode.run": 4}
    assert spy.keywords("decode", "plan", "window_left") == [8, -1, 21]


def test_layers_of_another_scale_or_cap_have_a_plan_of_their_own(spy) -> None:
    run_steps(spy, decode(5, 30), scaling=0.3, logit_cap=2.0)
    assert spy.keywords("decode", "plan", "sm_scale") == [0.3, 0.6]
    assert spy.keywords("decode", "plan", "logits_soft_cap") == [2.0, 4.0]


def test_scales_of_quantised_pools_are_numbers(spy) -> None:
    run_steps(spy, decode(5, 30), kv_dtype="fp8_e5m2", kv_scales=(0.5, 3.0))
    assert spy.keywords("decode", "run", "k_scale") == [0.5, None]
    assert spy.keywords("decode", "run", "v_scale") == [3.0, 6.0]


def test_steps_plan_once_and_layers_do_not(spy) -> None:
    run_steps(spy, decode(5, 30), decode(6, 31), windows=(None,) * 5)
    assert spy.counts["decode.plan"] == 2
    assert spy.counts["decode.run"] == 10


def test_only_replays_of_decode_take_the_fast_plan(spy) -> None:
    world = world_of(decode(5, 30))
    backend = FlashInferBackend(world.context, options(), spy.kernels)
    prepared = prepare_step(world, decode(5, 30), host_lens=True)
    runner = GraphRunner(
        backend,
        lambda batch, inputs: batch.positions + 1,
        GraphConfig(batch_sizes=(2, 4), host_lens=True),
        devices=RecordingGraphs(),
        progress=iter,
    )
    spy.clear()
    runner.capture(prepared.batch)
    assert spy.counts["decode.plan"] == 2
    spy.clear()
    runner.replay(prepared.batch)
    assert spy.counts == {"fast.call": 1}
    spy.clear()
    backend.init_forward_metadata(prepared.batch)
    assert spy.counts == {"decode.plan": 1}


def test_keys_of_another_dtype_are_read_as_the_pool_casts_them(spy) -> None:
    world = world_of(extend((0, 9), (0, 4)))
    backend = FlashInferBackend(world.context, options(), spy.kernels)
    prepared = prepare_step(world, extend((0, 9), (0, 4)), host_lens=True)
    given, batch = prepared.inputs[0], prepared.batch
    backend.init_forward_metadata(batch)
    found = backend.forward(given.q, given.k.float(), given.v.float(), given.layer, batch)
    expected = backend.forward(given.q, given.k, given.v, given.layer, batch)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_q_heads": 8, "num_kv_heads": 2}, True),
        ({"num_q_heads": 6, "num_kv_heads": 2}, False),
        ({"num_q_heads": 6, "num_kv_heads": 2, "kv_dtype": "fp8_e4m3"}, True),
        ({"num_q_heads": 2, "num_kv_heads": 2, "deterministic": True}, True),
    ],
)
def test_tensor_cores_from_four_heads_on_and_with_fp8(spy, settings, expected) -> None:
    run_steps(spy, decode(5), decode(7), **settings)
    world = world_of(decode(5), **settings)
    groups = tuple(plan_groups(world.context.layers, world.context.token_to_kv_pool).values())
    assert read_settings(world.context, options(), groups).tensor_cores is expected
    for asked, forced in (("on", True), ("off", expected and bool(settings.get("deterministic")))):
        read = read_settings(world.context, options(use_tensor_cores=asked), groups)
        assert read.tensor_cores is forced


def test_deterministic_decode_does_not_split_keys(spy) -> None:
    run_steps(spy, decode(5, 30), deterministic=True, kv_in_pool=True)
    assert spy.keywords("decode", "plan", "disable_split_kv") == [True]


@pytest.mark.parametrize(
    ("heads", "head_dim", "mib"),
    [((32, 8), 128, 256), ((28, 4), 128, 256), ((64, 4), 128, 512), ((32, 2), 256, 512)],
)
def test_workspace_follows_the_head_counts(heads, head_dim, mib) -> None:
    world = world_of(
        decode(1),
        num_q_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        v_head_dim=head_dim,
    )
    groups = tuple(plan_groups(world.context.layers, world.context.token_to_kv_pool).values())
    assert read_settings(world.context, options(), groups).workspace_bytes == mib * MIB
    given = read_settings(world.context, options(workspace_bytes=64 * MIB), groups)
    assert given.workspace_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("sizes", "tiles", "rows"),
    [
        ((160, 160), 40 + 160, 16),
        ((160, 640), 20 + 160, 128),
        ((512, 512), 128 + 512, 16),
        ((1, 8), 40, 64),  # one request is split over the whole device
    ],
)
def test_workspace_of_graphs(sizes, tiles, rows) -> None:
    """32 query heads over 8 of 128, so 4 rows a token; a partial output and its LSE in float32."""
    world = world_of(decode(1), num_q_heads=32, num_kv_heads=8)
    groups = tuple(plan_groups(world.context.layers, world.context.token_to_kv_pool).values())
    assert graph_workspace_bytes(groups, *sizes) == 32 * tiles * rows * (128 + 1) * 4


@pytest.mark.parametrize(
    ("heads", "sizes", "lists"),
    [
        # fa2: 3 numbers and a flag of a tile; a tile a request; a sum of each row and request
        ((32, 8), (160, 160), (40 + 160, 13, 161 + 161)),
        ((64, 4), (32, 256), (256 + 32, 13, 257 + 33)),
        # fa3: 7 numbers of a tile of a head; where those of each of 132 SMs begin
        ((64, 8), (160, 160), (64 * (2 + 159), 28, 133)),
    ],
)
def test_plans_of_graphs_fit_their_memory(heads, sizes, lists) -> None:
    world = world_of(decode(1), num_q_heads=heads[0], num_kv_heads=heads[1])
    groups = tuple(plan_groups(world.context.layers, world.context.token_to_kv_pool).values())
    tiles, of_tile, others = lists
    needed = tiles * of_tile + 4 * others
    assert needed < graph_plan_bytes(groups[0], *sizes) < 2 * MIB


def test_deterministic_decode_is_not_captured() -> None:
    """Whatever the engine asked the selector for: padded blocks would read beyond the plan."""
    world = world_of(decode(5), deterministic=True)
    backend = FlashInferBackend(world.context, options(), EMULATED)
    with pytest.raises(GraphUnsupported, match="deterministic"):
        backend.init_cuda_graph_state(2, 2)


def test_a_batch_without_host_lengths_is_refused() -> None:
    world = world_of(decode(5))
    backend = FlashInferBackend(world.context, options(), EMULATED)
    with pytest.raises(InvalidInput, match="seq_lens_cpu"):
        backend.init_forward_metadata(prepare_step(world, decode(5)).batch)


@pytest.mark.parametrize(
    ("step", "num_tokens"), [(decode(5, 6), 3), (decode(5, 6), 1), (extend((0, 5)), 4)]
)
def test_tokens_that_lengths_do_not_explain_are_refused(step, num_tokens) -> None:
    world = world_of(step)
    backend = FlashInferBackend(world.context, options(), EMULATED)
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    batch = prepare_step(world, step, host_lens=True).batch
    with pytest.raises(InvalidInput, match="out_cache_loc"):
        backend.init_forward_metadata(replace(batch, out_cache_loc=tokens, positions=tokens))


@pytest.mark.parametrize(
    ("settings", "given", "option"),
    [
        ({"kv_dtype": "fp8_e4m3"}, {"prefill_backend": "fa3"}, "prefill_backend"),
        ({"kv_dtype": "fp8_e5m2"}, {"decode_backend": "fa3"}, "decode_backend"),
        ({"num_q_heads": 14}, {"use_tensor_cores": "off"}, "use_tensor_cores"),
    ],
)
def test_options_that_no_kernel_serves(settings, given, option) -> None:
    world = world_of(decode(5), **settings)
    with pytest.raises(InvalidInput, match=option):
        FlashInferBackend(world.context, options(**given), EMULATED)


def test_drafts_and_masks_are_not_given_to_fa3(spy) -> None:
    """The library keeps what "auto" came to, and fa3 would drop the mask."""
    for settings in ({"spec_topk": 1}, {"spec_topk": 4}):
        run_steps(spy, verify(4, 9, 20), **settings)
        world = world_of(verify(4, 9, 20), **settings)
        spy.clear()
        FlashInferBackend(world.context, options(prefill_backend="fa3"), spy.kernels)
        assert spy.keywords("paged", "make", "backend") == ["fa2"]


def test_a_kernel_that_does_not_compile_fails_the_constructor() -> None:
    def no_compiler(*args: object, **kwargs: object) -> object:
        raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda'\nmore")

    world = world_of(decode(5))
    with pytest.raises(BackendFailed, match="Could not find nvcc") as failed:
        FlashInferBackend(world.context, options(), replace(EMULATED, decode=no_compiler))
    assert failed.value.address == "nvidia/flashinfer"
    assert "pip install 'attnmux-nvidia[flashinfer]'" in str(failed.value)
    assert "more" not in str(failed.value)


@pytest.mark.parametrize(
    ("step", "settings", "made"),
    [
        (decode(5), {}, {"decode"}),
        (extend((3, 5)), {}, {"ragged", "paged"}),
        (extend((3, 5)), {"windows": (4,)}, {"paged"}),
        (verify(4, 9), {"spec_topk": 4}, {"paged"}),
        (extend((0, 5)), {"is_encoder": True, "save_kv_cache": False}, {"ragged"}),
    ],
)
def test_the_constructor_plans_what_steps_will(spy, step, settings, made) -> None:
    """Each phase that the request asks for, so that no step compiles anything."""
    world = world_of(step, **settings)
    FlashInferBackend(world.context, options(), spy.kernels)
    assert {kind for kind, method, _ in spy.calls if method == "plan"} == made


def test_more_heads_than_a_block_of_the_merge_holds() -> None:
    case = Case(
        name="many-heads", steps=(UNEVEN,), num_q_heads=72, num_kv_heads=8, lse=True, head_dim=128
    )
    outcome = run_case(CANDIDATE, case)
    assert outcome.status == "passed", outcome.message


@pytest.mark.parametrize("step", [extend((0, 9), (0, 4)), UNEVEN, decode(9, 4)])
def test_rows_that_the_kernels_cannot_load_are_copied(step) -> None:
    world = world_of(step)
    backend = FlashInferBackend(world.context, options(), EMULATED)
    prepared = prepare_step(world, step, host_lens=True)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]

    def odd(rows: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(len(rows), rows[0].numel() + 3, dtype=rows.dtype)
        return wide[:, 1 : rows[0].numel() + 1].view(rows.shape).copy_(rows)

    def forward(q: Any, k: Any, v: Any, **into: torch.Tensor) -> torch.Tensor:
        return backend.forward(q, k, v, given.layer, prepared.batch, **into)

    lse = torch.zeros(given.q.shape[:2])
    expected = forward(given.q, given.k, given.v, lse=lse)
    out, apart = odd(torch.full_like(given.q, 7)), torch.zeros_like(lse.t()).t()
    assert forward(odd(given.q), odd(given.k), odd(given.v), out=out, lse=apart) is out
    assert torch.equal(out, expected)
    assert torch.equal(apart, lse)


def test_a_merge_writes_where_the_caller_wants(spy) -> None:
    """Neither out nor LSE is copied: the second part is merged into the first in place."""
    world = world_of(UNEVEN)
    backend = FlashInferBackend(world.context, options(), spy.kernels)
    prepared = prepare_step(world, UNEVEN, host_lens=True)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    out, lse = torch.empty_like(given.q), torch.zeros(given.q.shape[:2])
    spy.clear()
    backend.forward(given.q, given.k, given.v, given.layer, prepared.batch, out=out, lse=lse)
    assert spy.keywords("ragged", "run", "out") == [out]
    assert spy.keywords("ragged", "run", "lse") == [lse]


@pytest.mark.parametrize("step", [decode(5), extend((0, 5))])
def test_forward_needs_a_prepared_step(step) -> None:
    world = world_of(step)
    backend = FlashInferBackend(world.context, options(), EMULATED)
    prepared = prepare_step(world, step, host_lens=True)
    backend.init_forward_metadata_out_graph(
        prepare_step(world, extend(mode=ForwardMode.IDLE), host_lens=True).batch
    )
    given = prepared.inputs[0]
    with pytest.raises(AttnmuxError, match="init_forward_metadata"):
        backend.forward(given.q, given.k, given.v, given.layer, prepared.batch)


@pytest.mark.parametrize("max_batch_size", [0, 1])
def test_a_capture_without_room_is_refused(max_batch_size) -> None:
    world = world_of(decode(5, 6))
    backend = FlashInferBackend(world.context, options(), EMULATED)
    if max_batch_size:
        backend.init_cuda_graph_state(max_batch_size, max_batch_size)
    batch = prepare_step(world, decode(5, 6), host_lens=True).batch
    with pytest.raises(GraphUnsupported, match="init_cuda_graph_state"):
        backend.init_forward_metadata_out_graph(batch, in_capture=True)


def test_plans_are_made_when_those_of_the_step_before_were_copied(spy, monkeypatch) -> None:
    def noted(name: str) -> Callable[[object], None]:
        return lambda staging: spy.calls.append(("staging", name, {}))

    for name in ("wait", "mark"):
        monkeypatch.setattr(Staging, name, noted(name))
    run_steps(spy, UNEVEN, decode(5), kv_in_pool=True)
    order = [method for _, method, _ in spy.calls if method in ("wait", "plan", "mark")]
    eager, lazy = ["wait", "plan", "plan", "mark"], ["plan", "mark"]
    assert order == [*eager, *lazy, "wait", "plan", "mark"]


ITEMS = extend((9, 13), (0, 30), (21, 9), items=((6, 7), (3, 5, 2, 11), (1, 14, 5)))
"""A prefix that is cached in part, one that is not, and one whose first item is cached too."""

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"lse": True},
    "cap": {"logit_cap": 2.0},
    "windows": {"windows": (5, None, 40)},
    "in-pool": {"kv_in_pool": True},
    "fp8": {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)},
}


@pytest.mark.parametrize("settings", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED], ids=lambda m: m.name)
def test_many_items_beside(mode, settings) -> None:
    steps = (replace(ITEMS, mode=mode), replace(ITEMS, mode=mode, trailing=4))
    case = Case(name="items", steps=steps, page_size=3, **settings)
    outcome = run_case(CANDIDATE, case)
    assert outcome.status == "passed", outcome.message


def test_the_last_of_many_short_items_load_no_value_behind_the_keys() -> None:
    """What lies in the reserved slot is then multiplied by 0, and here it is NaN."""
    step = extend((30, 20), (0, 126), items=((5, 5, 5), (5,) * 24))
    outcome = run_case(CANDIDATE, Case(name="short items", steps=(step,), page_size=1))
    assert outcome.status == "passed", outcome.message


def test_items_are_planned_once_a_step_and_for_fa2(spy) -> None:
    run_steps(spy, ITEMS, extend((0, 7)), windows=(8, None))
    plans = [given for kind, method, given in spy.calls if (kind, method) == ("paged", "plan")]
    first, second, *others = [given.get("prefix_len_ptr") for given in plans]
    assert first is second
    assert first.tolist() == [9, 9, 10]
    assert others == [None, None]
    assert plans[0]["token_pos_in_items_len"] == 31
    assert plans[0]["max_item_len_ptr"].tolist() == [128, 128, 128]
    assert "ragged" not in {kind for kind, _, _ in spy.calls}
    FlashInferBackend(world_of(ITEMS).context, options(prefill_backend="fa3"), spy.kernels)
    assert spy.keywords("paged", "make", "backend") == ["fa3", "fa2"]


def with_items(step: Step, **settings: Any) -> tuple[FlashInferBackend, Any, Any]:
    """A backend with a step of many items that was not made for them."""
    world = world_of(step, **settings)
    backend = FlashInferBackend(world.context, options(), EMULATED)
    prepared = prepare_step(world, step, host_lens=True)
    lens, tokens = prepared.batch.seq_lens, prepared.batch.num_tokens
    items = MultiItem(
        prefix_lens=torch.zeros_like(lens),
        token_pos_in_items=torch.zeros(tokens, dtype=torch.int32),
    )
    return backend, prepared, replace(prepared.batch, multi_item=items)


@pytest.mark.parametrize(
    ("step", "settings", "came"),
    [
        (decode(5), {}, "DECODE"),
        (verify(4, 9), {"spec_topk": 1}, "TARGET_VERIFY"),
        (extend((2, 3), mode=ForwardMode.DRAFT_EXTEND), {"spec_topk": 1}, "DRAFT_EXTEND"),
    ],
)
def test_items_are_refused_where_no_kernel_masks_by_them(step, settings, came) -> None:
    backend, _, batch = with_items(step, **settings)
    with pytest.raises(InvalidInput, match=f"multi_item.*{came}"):
        backend.init_forward_metadata(batch)


def test_items_over_the_calls_keys_are_refused() -> None:
    backend, prepared, batch = with_items(extend((0, 5)))
    backend.init_forward_metadata(batch)
    given = prepared.inputs[0]
    with pytest.raises(InvalidInput, match=r"multi_item.*save_kv_cache=True"):
        backend.forward(given.q, given.k, given.v, given.layer, batch, False)


def test_an_item_beyond_16_bits_is_refused() -> None:
    _, _, batch = with_items(extend((0, 5)))
    assert batch.multi_item is not None
    batch.multi_item.token_pos_in_items[3] = LONGEST
    lens = torch.tensor([LONGEST + 5], dtype=torch.int32)
    with pytest.raises(InvalidInput, match=f"an item of {LONGEST + 1} tokens"):
        lay_out(batch.multi_item, batch.positions, batch.extend_seq_lens_cpu, lens)
    batch.multi_item.token_pos_in_items[3] = LONGEST - 1
    laid = lay_out(batch.multi_item, batch.positions, batch.extend_seq_lens_cpu, lens)
    assert laid.longest.tolist() == [LONGEST]


SUNK: dict[str, tuple[Step, dict[str, Any]]] = {
    "verify": (verify(4, 9, 30, 16), {"spec_topk": 1}),
    "draft": (extend((20, 3), (5, 1), mode=ForwardMode.DRAFT_EXTEND), {"spec_topk": 1}),
    "deterministic": (decode(45, 3, 17), {"deterministic": True, "kv_in_pool": True}),
    "scale": (decode(45, 3), {"scaling": 0.3}),
    "fp8": (decode(45, 3), {"kv_dtype": "fp8_e4m3", "kv_scales": (0.5, 3.0)}),
    "small-scale": (extend((7, 20)), {"kv_dtype": "fp8_e5m2", "kv_scales": (1e-5, 1.5)}),
    "padding": (extend((4, 9), (0, 20), padding=2, trailing=3), {"windows": (8, None)}),
    "cross": (extend((0, 5), (7, 3), encoder=(12, 0)), {}),
}


@pytest.mark.parametrize(("step", "settings"), SUNK.values(), ids=SUNK)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_sinks_beside(step, settings, graph) -> None:
    if graph and (settings.get("deterministic") or not step.can_be_captured):
        pytest.skip("no graph serves it")
    case = Case(name="sinks", steps=(step,), sinks=True, lse=True, graph=graph, **settings)
    outcome = run_case(CANDIDATE, case)
    assert outcome.status == "passed", outcome.message


def test_sinks_are_compiled_into_the_paged_kernels(spy) -> None:
    run_steps(spy, decode(5, 30), windows=(8, None), sinks=True)
    assert spy.counts == {"paged.plan": 2, "paged.run": 2}
    spy.clear()
    world = world_of(extend((3, 5)), windows=(8, None), sinks=True)
    FlashInferBackend(world.context, options(prefill_backend="auto"), spy.kernels)
    assert spy.keywords("paged", "make", "backend") == ["fa2", "fa2"]
    windowed, full = spy.keywords("paged", "make", "jit_args")
    assert windowed[0] != full[0]
    assert spy.keywords("paged", "make", "jit_kwargs") == [
        {"use_sliding_window": True},
        {"use_sliding_window": False},
    ]


@pytest.mark.parametrize("sink", [-torch.inf, 3e4])
@pytest.mark.parametrize("step", [decode(0, 5), extend((0, 9), (4, 2))])
def test_sinks_of_any_size(step, sink) -> None:
    world = world_of(step, sinks=True)
    for layer in world.context.layers:
        assert layer.sinks is not None
        layer.sinks[:2] = sink
    backend = FlashInferBackend(world.context, options(), EMULATED)
    prepared = prepare_step(world, step, host_lens=True)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    lse = torch.zeros(given.q.shape[:2])
    out = backend.forward(given.q, given.k, given.v, given.layer, prepared.batch, lse=lse)
    expected, expected_lse = reference.attention(
        given.q,
        given.layer,
        prepared.batch,
        world.context.req_to_token_pool.req_to_token,
        world.context.token_to_kv_pool,
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-3, rtol=1e-5)


@pytest.mark.parametrize(
    ("step", "settings", "argument"),
    [
        (decode(5), {"logit_cap": 2.0}, "logit_cap.*2 beside sinks"),
        (verify(4, 9), {"spec_topk": 4}, "sinks.*custom mask"),
        (ITEMS, {}, "sinks.*many items"),
        (extend((0, 5)), {"is_encoder": True, "save_kv_cache": False}, "sinks.*of the call"),
    ],
)
def test_sinks_that_no_kernel_looks_at_are_refused(step, settings, argument) -> None:
    world = world_of(step, sinks=True, **settings)
    with pytest.raises(InvalidInput, match=argument):
        FlashInferBackend(world.context, options(), EMULATED)


def test_sinks_over_the_calls_keys_are_refused() -> None:
    world = world_of(extend((0, 5)), sinks=True)
    backend = FlashInferBackend(world.context, options(), EMULATED)
    prepared = prepare_step(world, extend((0, 5)), host_lens=True)
    backend.init_forward_metadata(prepared.batch)
    given = prepared.inputs[0]
    with pytest.raises(InvalidInput, match=r"sinks.*of the call"):
        backend.forward(given.q, given.k, given.v, given.layer, prepared.batch, False)


def test_kernels_without_sinks_refuse_them() -> None:
    world = world_of(decode(5), sinks=True)
    with pytest.raises(InvalidInput, match="sinks"):
        FlashInferBackend(world.context, options(), replace(EMULATED, sinks=None))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")
def test_steps_that_are_prepared_while_the_device_is_behind() -> None:
    """Plans of later steps must not reach the device in place of an earlier one's."""
    library = pytest.importorskip("attnmux.nvidia.flashinfer.factory", exc_type=ImportError)
    steps = [decode(*lens) for lens in ((700, 3), (5, 900), (64, 64), (1, 1000))]
    case = Case(name="behind", steps=steps, max_context_len=1024, page_size=1, kv_in_pool=True)
    world = make_world(case, CANDIDATE.platform, "cuda")
    backend = library.make(world.context, options())
    prepared = [prepare_step(world, step, host_lens=True) for step in steps]
    # What a step put into the pool, the next one's took the place of.
    buffers = world.context.token_to_kv_pool.get_kv_buffer(prepared[0].inputs[0].layer.layer_id)
    for buffer in buffers:
        buffer.normal_()
    world.context.req_to_token_pool.req_to_token.random_(1, len(buffers[0]))

    def outputs(behind: bool) -> list[torch.Tensor]:
        results = []
        if behind:
            torch.cuda._sleep(500_000_000)
        for each in prepared:
            backend.init_forward_metadata(each.batch)
            given = each.inputs[0]
            results.append(backend.forward(given.q, None, None, given.layer, each.batch))
            if not behind:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return results

    torch.testing.assert_close(outputs(behind=True), outputs(behind=False), rtol=0, atol=0)


def test_graphs_of_two_modes_on_one_backend() -> None:
    """The second runner's sizes do not take the buffers of the first."""
    steps = (decode(5, 30), verify(4, 9, 20))
    world = world_of(*steps, spec_topk=1)
    backend = FlashInferBackend(world.context, options(), EMULATED)

    def runner(step: Step, mode: ForwardMode, tokens: int) -> tuple[GraphRunner, Any]:
        prepared = prepare_step(world, step, host_lens=True)

        def forward(batch: Any, inputs: Any) -> list[torch.Tensor]:
            return [
                backend.forward(given.q, None, None, given.layer, batch)
                for given in prepared.inputs
            ]

        config = GraphConfig(
            batch_sizes=(2,), forward_mode=mode, tokens_per_request=tokens, host_lens=True
        )
        made = GraphRunner(backend, forward, config, devices=RecordingGraphs(), progress=iter)
        made.capture(prepared.batch)
        return made, prepared

    runners = [
        runner(steps[0], ForwardMode.DECODE, 1),
        runner(steps[1], ForwardMode.TARGET_VERIFY, 4),
    ]
    for made, prepared in runners:
        replayed = [out.clone() for out in made.replay(prepared.batch)]
        backend.init_forward_metadata(prepared.batch)
        for out, given in zip(replayed, prepared.inputs, strict=True):
            eager = backend.forward(given.q, None, None, given.layer, prepared.batch)
            torch.testing.assert_close(out, eager, equal_nan=True)


@pytest.mark.parametrize(
    ("asked", "chosen"),
    [
        ("dtype=bf16", "fa3"),
        ("dtype=bf16,spec_topk=4,custom_mask=true", "flashinfer"),
        ("dtype=bf16,spec_topk=1,page_size=64", "flashinfer"),
    ],
)
def test_rank_beside_fa3(asked, chosen) -> None:
    from_plugin = pytest.importorskip("attnmux.nvidia.plugin").attnmux_cards()
    offers = [Offer(card=card, plugin="nvidia") for card in from_plugin]
    platform = Platform.parse("nvidia:sm90,cuda=13.0")
    decision = solve(Request.parse(asked), platform, offers, Policy(hypothetical=True))
    assert {choice.backend for choice in decision.phases.values()} == {chosen}


@pytest.mark.parametrize("platform", ["nvidia:sm80,cuda=13.0", "nvidia:sm89,cuda=12.6"])
def test_first_on_other_devices(platform) -> None:
    offers = [Offer(card=FLASHINFER, plugin="nvidia")]
    decision = solve(
        Request.parse("dtype=fp16,kv_dtype=fp8_e5m2,head_dim=64,page_size=7,sliding_window=9"),
        Platform.parse(platform),
        offers,
        Policy(hypothetical=True),
    )
    assert {choice.backend for choice in decision.phases.values()} == {"flashinfer"}
