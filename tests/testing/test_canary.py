"""The canary: planted faults are found within 100 steps, and correct backends raise no alarm."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    ForwardBatch,
    ForwardMode,
    GraphConfig,
    GraphRunner,
    InvalidInput,
    LayerSpec,
    ModelInput,
)
from attnmux.core.composites.dispatch import HybridAttnBackend
from attnmux.cpu.torch_native import TorchNativeBackend
from attnmux.testing import (
    CanaryBackend,
    CanaryFinding,
    CanarySample,
    Case,
    FakeBackend,
    GraphFakeBackend,
    RecordingGraphs,
    decode,
    fake_platform,
    find_candidate,
    make_setup,
    run_case,
)
from attnmux.testing.fakes.backend import FullMetadata
from attnmux.transformers.requests.slots import PagedAllocator

WITHIN = 100
"""Steps in which a planted fault must be found."""


@dataclass
class _Live:
    row: int
    slots: torch.Tensor
    end: int


class Traffic:
    """Requests that come, decode and leave, on scattered and reused pages."""

    def __init__(self, case: Case, seed: int) -> None:
        self.setup = make_setup(case, fake_platform(), "cpu", seed=seed)
        self.context = self.setup.context
        pool = self.context.token_to_kv_pool
        self.allocator = PagedAllocator(pool.size, pool.page_size, "cpu")
        self.random = random.Random(seed)
        self.live: list[_Live] = []

    def run(self, backend: AttentionBackend, steps: int) -> None:
        for _ in range(steps):
            self.step(backend)

    def step(self, backend: AttentionBackend) -> None:
        batch = self.next_batch()
        backend.init_forward_metadata(batch)
        for layer in self.context.layers:
            self.call(backend, layer, batch)

    def next_batch(self) -> ForwardBatch:
        """An extend step while there are few requests, now and then a chunk more; else decode."""
        for done in [each for each in self.live if len(each.slots) >= each.end]:
            self.allocator.free(done.slots)
            self.context.req_to_token_pool.free([done.row])
            self.live.remove(done)
        if len(self.live) < 3 or self.random.random() < 0.15:
            return self._extend()
        return self._batch(self.live, [1] * len(self.live), ForwardMode.DECODE)

    def call(
        self, backend: AttentionBackend, layer: LayerSpec, batch: ForwardBatch
    ) -> torch.Tensor:
        tokens, rope = batch.num_tokens, layer.qk_rope_head_dim
        draw = self.setup.random
        q = draw(tokens, layer.tp_q_head_num, layer.query_dim)
        k = draw(tokens, layer.tp_k_head_num, layer.qk_head_dim - rope)
        v = None if rope else draw(tokens, layer.tp_v_head_num, layer.v_head_dim)
        parts = {}
        if rope:
            parts = {
                "q_rope": draw(tokens, layer.tp_q_head_num, rope),
                "k_rope": draw(tokens, 1, rope),
            }
        lse = torch.zeros(q.shape[:2])
        return backend.forward(q, k, v, layer, batch, lse=lse, **parts)

    def _extend(self) -> ForwardBatch:
        chosen = self.random.sample(self.live, min(len(self.live), 1))
        table = self.context.req_to_token_pool
        while len(self.live) < 4 and table.available_size():
            (row,) = table.alloc(1)
            end = self.random.randrange(24, 56)
            self.live.append(_Live(row, torch.zeros(0, dtype=torch.int64), end))
            chosen.append(self.live[-1])
        return self._batch(
            chosen, [self.random.randrange(2, 8) for _ in chosen], ForwardMode.EXTEND
        )

    def _batch(self, requests: list[_Live], new: list[int], mode: ForwardMode) -> ForwardBatch:
        cached = torch.tensor([len(each.slots) for each in requests], dtype=torch.int32)
        added = torch.tensor(new, dtype=torch.int32)
        rows = torch.tensor([each.row for each in requests])
        last = torch.tensor([int(each.slots[-1]) if len(each.slots) else -1 for each in requests])
        loc = self.allocator.alloc_extend(cached, cached + added, last, sum(new))
        self.context.req_to_token_pool.write(rows, cached, added, loc)
        for request, slots in zip(requests, loc.split(new), strict=True):
            request.slots = torch.cat([request.slots, slots])
        places = [
            torch.arange(len(each.slots) - count, len(each.slots))
            for each, count in zip(requests, new, strict=True)
        ]
        extends = {}
        if mode.is_extend():
            extends = {
                "extend_seq_lens": added,
                "extend_prefix_lens": cached,
                "extend_num_tokens": sum(new),
            }
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(requests),
            req_pool_indices=rows,
            seq_lens=cached + added,
            out_cache_loc=loc,
            positions=torch.cat(places),
            **extends,
        )


def case(page_size: int = 4, **changes: object) -> Case:
    given: dict[str, object] = {
        "name": "traffic",
        "steps": (decode(64, 64, 64, 64, 64),),
        "head_dim": 32,
        "v_head_dim": 32,
        "page_size": page_size,
        "max_context_len": 96,
        "windows": (None, 7),
        "lse": True,
        **changes,
    }
    return Case(**given)


class Faulty(FakeBackend):
    """A correct backend for faults to be planted in. They come and go by `strikes`."""

    seed = 0

    def __init__(self, context: BackendContext, *_: object) -> None:
        super().__init__(context)
        self.random = random.Random(self.seed)

    def strikes(self, share: float = 0.4) -> bool:
        return self.random.random() < share


class SwappedPage(Faulty):
    def key_slots(self, layer: LayerSpec, metadata: FullMetadata, request: int) -> torch.Tensor:
        """Read a page of the next request in place of the first of its own."""
        slots = super().key_slots(layer, metadata, request).clone()
        other = (request + 1) % len(metadata.slots)
        page = min(self.context.token_to_kv_pool.page_size, len(slots))
        if self.strikes():
            slots[:page] = metadata.slots[other, :page]
        return slots


class StaleMetadata(Faulty):
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Decode with the lengths and slots of the step before."""
        was_decode = self.full is not None and int(self.full.new.max()) == 1
        same_size = self.full is not None and len(self.full.new) == batch.batch_size
        decodes = batch.forward_mode.is_decode() and was_decode and same_size
        if not decodes or not self.strikes():
            super().init_forward_metadata_in_graph(batch)


class StaleLengths(Faulty):
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """The newest token of a decoding request is not seen."""
        super().init_forward_metadata_in_graph(batch)
        if self.full is not None and batch.forward_mode.is_decode() and self.strikes():
            self.full = replace(self.full, cached=self.full.cached - 1)


class NothingStored(Faulty):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        pass


class KeysAloneStored(Faulty):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        pool = self.context.token_to_kv_pool
        values = pool.get_value_buffer(layer.layer_id)[batch.out_cache_loc]
        super().save_kv(k, values.to(k.dtype), layer, batch)


class LostWrite(Faulty):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        """One token's K and V are lost now and then."""
        if self.strikes():
            kept = [i for i in range(len(k)) if i != self.random.randrange(len(k))]
            batch = replace(batch, out_cache_loc=batch.out_cache_loc[kept])
            k, v = k[kept], v[kept]
        super().save_kv(k, v, layer, batch)


class WriteOneSlotOff(Faulty):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        loc = batch.out_cache_loc
        if self.strikes():
            last = self.context.token_to_kv_pool.num_slots - 1
            loc = (loc + 1).clamp(max=last)
        super().save_kv(k, v, layer, replace(batch, out_cache_loc=loc))


class KeysAndValuesSwapped(Faulty):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        super().save_kv(v, k, layer, batch)


class StoredUnscaled(Faulty):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        super().save_kv(k, v, replace(layer, k_scale=None, v_scale=None), batch)


class ForeignPageOverwritten(Faulty):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        super().save_kv(k, v, layer, batch)
        pool = self.context.token_to_kv_pool
        slot = self.random.randrange(pool.page_size, pool.num_slots)
        if self.strikes() and slot not in batch.out_cache_loc:
            pool.get_key_buffer(layer.layer_id)[slot] = 1


class PageTailCleared(Faulty):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        """The slot before the new token's is cleared."""
        super().save_kv(k, v, layer, batch)
        slot = int(batch.out_cache_loc[0]) - 1
        if slot not in batch.out_cache_loc:
            self.context.token_to_kv_pool.get_value_buffer(layer.layer_id)[slot] = 0


class BitFlipped(Faulty):
    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """A cached token's K decays between two steps."""
        super().init_forward_metadata_out_graph(batch, in_capture)
        pool, table = self.context.token_to_kv_pool, self.context.req_to_token_pool.req_to_token
        layer = self.random.choice(self.context.layers)
        if batch.forward_mode.is_decode() and self.strikes():
            slot = int(table[int(batch.req_pool_indices[0]), 0])
            pool.get_key_buffer(layer.layer_id).view(torch.uint8)[slot, 0, 0] ^= 1


class PageRestored(Faulty):
    """Pages come back from a copy that is older than their last write."""

    kept: torch.Tensor | None = None

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        super().init_forward_metadata_out_graph(batch, in_capture)
        buffer = self.context.token_to_kv_pool.get_value_buffer(self.context.layers[0].layer_id)
        if self.kept is not None and self.strikes(0.2):
            buffer.view(torch.uint8).copy_(self.kept)
        self.kept = buffer.view(torch.uint8).clone()


class TableRewritten(Faulty):
    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Two requests exchange their first slots."""
        table, rows = self.context.req_to_token_pool.req_to_token, batch.req_pool_indices
        if batch.forward_mode.is_decode() and self.strikes():
            table[rows[:2], 0] = table[rows[:2].flip(0), 0]
        super().init_forward_metadata_out_graph(batch, in_capture)


class BaseTwoLSE(Faulty):
    def attend(self, q, k, v, keep, layer):
        out, lse = super().attend(q, k, v, keep, layer)
        return out, lse / math.log(2)


class LSEWithoutSinks(Faulty):
    def attend(self, q, k, v, keep, layer):
        out, _ = super().attend(q, k, v, keep, layer)
        return out, super().attend(q, k, v, keep, replace(layer, sinks=None))[1]


class SinksIgnored(Faulty):
    def attend(self, q, k, v, keep, layer):
        return super().attend(q, k, v, keep, replace(layer, sinks=None))


class SlopesNegated(Faulty):
    def biased(self, q, k, layer, positions):
        layer = replace(layer, alibi_slopes=-layer.alibi_slopes)
        return super().biased(q, k, layer, positions)


class PlacesOneLate(Faulty):
    def biased(self, q, k, layer, positions):
        return super().biased(q, k, layer, positions + 1)


class TableMirrored(Faulty):
    def relative(self, q, k, layer, positions):
        table = layer.relative_bias.flip(1)
        return super().relative(q, k, replace(layer, relative_bias=table), positions)


class CapIgnored(Faulty):
    def attend(self, q, k, v, keep, layer):
        return super().attend(q, k, v, keep, replace(layer, logit_cap=0.0))


class WrongScaling(Faulty):
    def attend(self, q, k, v, keep, layer):
        return super().attend(q, k, v, keep, replace(layer, scaling=layer.scaling * 2**0.5))


class WrongKVHead(Faulty):
    def attend(self, q, k, v, keep, layer):
        picked = torch.arange(q.shape[1]) % k.shape[1]
        return super().attend(q, k[:, picked], v[:, picked], keep, layer)


class OneHeadIsWrong(Faulty):
    def attend(self, q, k, v, keep, layer):
        out, lse = super().attend(q, k, v, keep, layer)
        out[:, 5] = out[:, 4]
        return out, lse


class LastRequestIsWrong(Faulty):
    def prefix_len(self, metadata: FullMetadata, request: int) -> int:
        off = request == len(metadata.new) - 1 and int(metadata.cached[request]) > 1
        return super().prefix_len(metadata, request) - off


class NaNInARow(Faulty):
    def attend(self, q, k, v, keep, layer):
        out, lse = super().attend(q, k, v, keep, layer)
        if self.strikes(0.2):
            out[-1] = torch.nan
        return out, lse


class ReadAsFnuz(Faulty):
    def read(self, layer: LayerSpec, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bits of e4m3fn taken for those of e4m3fnuz, whose bias is one more."""
        keys, values = self.context.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        scales = layer.k_scale or 1, layer.v_scale or 1
        of_amd = [buffer.view(torch.float8_e4m3fnuz)[slots] for buffer in (keys, values)]
        return of_amd[0].double() * scales[0], of_amd[1].double() * scales[1]


class ValueScaleIgnored(Faulty):
    def read(self, layer: LayerSpec, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().read(replace(layer, v_scale=1.0), slots)


class WindowOneTooWide(Faulty):
    def visible(self, layer: LayerSpec, *args: object) -> torch.Tensor:
        window = layer.sliding_window_size
        return super().visible(
            replace(layer, sliding_window_size=window if window < 0 else window + 1), *args
        )


class CausalOffByOne(Faulty):
    def visible(self, layer: LayerSpec, *args: object) -> torch.Tensor:
        keep = super().visible(layer, *args).clone()
        keep[:-1] |= keep[1:].clone()
        return keep


class LastPageSkipped(Faulty):
    def key_slots(self, layer: LayerSpec, metadata: FullMetadata, request: int) -> torch.Tensor:
        """Read the page before the last one again where the last one is full."""
        slots = super().key_slots(layer, metadata, request).clone()
        page = self.context.token_to_kv_pool.page_size
        if len(slots) > page and len(slots) % page == 0:
            slots[-page:] = slots[-2 * page : -page]
        return slots


class PageEndRead(Faulty):
    def key_slots(self, layer: LayerSpec, metadata: FullMetadata, request: int) -> torch.Tensor:
        slots = super().key_slots(layer, metadata, request).clone()
        if len(slots) % self.context.token_to_kv_pool.page_size:
            slots[-2:-1] = slots[-1:] + 1
        return slots


EIGHT_BITS = {"kv_dtype": "fp8_e4m3", "kv_scales": (0.25, 0.5)}
FAULTS: tuple[tuple[type[Faulty], dict[str, object]], ...] = (
    (SwappedPage, {}),
    (StaleMetadata, {}),
    (StaleLengths, {}),
    (NothingStored, {}),
    (KeysAloneStored, {}),
    (LostWrite, {}),
    (WriteOneSlotOff, {}),
    (KeysAndValuesSwapped, {}),
    (StoredUnscaled, EIGHT_BITS),
    (ForeignPageOverwritten, {}),
    (PageTailCleared, {}),
    (BitFlipped, {}),
    (BitFlipped, EIGHT_BITS),
    (PageRestored, {}),
    (TableRewritten, {}),
    (BaseTwoLSE, {}),
    (LSEWithoutSinks, {"sinks": True}),
    (SinksIgnored, {"sinks": True}),
    (SlopesNegated, {"alibi": True}),
    (PlacesOneLate, {"alibi": True, "lse": True}),
    (TableMirrored, {"relative_reach": 6}),
    (CapIgnored, {"logit_cap": 1.0}),
    (WrongScaling, {}),
    (WrongKVHead, {}),
    (OneHeadIsWrong, {}),
    (LastRequestIsWrong, {}),
    (NaNInARow, {}),
    (ReadAsFnuz, EIGHT_BITS),
    (ValueScaleIgnored, EIGHT_BITS),
    (WindowOneTooWide, {}),
    (CausalOffByOne, {}),
    (LastPageSkipped, {}),
    (PageEndRead, {}),
)
NUM_PLANTED = 100


def planted(number: int) -> tuple[type[Faulty], Case]:
    """The fault of that number, in a case drawn with it."""
    drawn = random.Random(number)
    fault, needs = FAULTS[number % len(FAULTS)]
    heads, group = drawn.choice([1, 2, 3]), drawn.choice([2, 4])
    shapes = {"num_kv_heads": heads, "num_q_heads": max(heads * group, 6)}
    if fault is WrongKVHead:
        shapes = {"num_kv_heads": 2, "num_q_heads": 8}
    page = drawn.choice([1, 4, 16])
    if fault in (LastPageSkipped, PageEndRead):
        page = 4
    dtype = drawn.choice(["bfloat16", "float16", "float32"])
    return fault, case(page, **{"dtype": dtype, **shapes, **needs})


@pytest.mark.parametrize(
    "number", range(NUM_PLANTED), ids=lambda n: f"{n}-{FAULTS[n % len(FAULTS)][0].__name__}"
)
def test_a_planted_fault_is_found(number: int) -> None:
    fault, of = planted(number)
    traffic = Traffic(of, seed=number)
    backend = type(fault.__name__, (fault,), {"seed": number})(traffic.context)
    canary = CanaryBackend(backend, share=1, seed=number)
    with pytest.raises(CanaryFinding) as found:
        traffic.run(canary, WITHIN)
    assert str(found.value.step) in str(found.value)


CLEAN = {
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "fp32-page1": {"dtype": "float32", "page_size": 1},
    "e4m3": {"dtype": "bfloat16", **EIGHT_BITS},
    "e5m2-page16": {"dtype": "float16", "kv_dtype": "fp8_e5m2", "page_size": 16},
    "sinks-cap": {"dtype": "bfloat16", "sinks": True, "logit_cap": 2.0},
    "alibi": {"dtype": "bfloat16", "alibi": True, "lse": True},
    "relative": {"dtype": "bfloat16", "relative_reach": 6, "lse": True},
    "mla": {
        "dtype": "bfloat16",
        "kind": "mla",
        "num_q_heads": 4,
        "num_kv_heads": 1,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "windows": (None, None),
    },
}


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("make", [FakeBackend, TorchNativeBackend])
@pytest.mark.turns(6)
def test_a_correct_backend_raises_no_alarm(
    name: str, make: Callable[[BackendContext], AttentionBackend], full: bool
) -> None:
    num_steps = 150 if full else 60
    traffic = Traffic(case(**CLEAN[name]), seed=7)
    canary = CanaryBackend(make(traffic.context), share=1)
    traffic.run(canary, num_steps)
    assert canary.checked_steps == num_steps


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_only_a_share_of_the_steps_is_checked(share: float) -> None:
    """Slots that unchecked steps wrote again are no finding."""
    traffic = Traffic(case(page_size=1), seed=3)
    canary = CanaryBackend(TorchNativeBackend(traffic.context), share=share, seed=5)
    traffic.run(canary, 100)
    assert abs(canary.checked_steps - 100 * share) < 25
    traffic = Traffic(case(page_size=1), seed=4)
    again = CanaryBackend(TorchNativeBackend(traffic.context), share=share, seed=5)
    traffic.run(again, 100)
    assert again.checked_steps == canary.checked_steps


def test_a_share_is_refused_outside_0_to_1() -> None:
    with pytest.raises(InvalidInput, match="share"):
        CanaryBackend(FakeBackend(Traffic(case(), seed=0).context), share=2)


def test_findings_can_be_collected() -> None:
    traffic = Traffic(case(), seed=0)
    found: list[CanaryFinding] = []
    canary = CanaryBackend(NothingStored(traffic.context), share=1, on_finding=found.append)
    traffic.run(canary, 3)
    finding = found[0]
    assert finding.check == "store"
    assert finding.layer_id in {layer.layer_id for layer in traffic.context.layers}
    assert finding.slot is not None
    assert finding.request_row is not None
    assert "request row" in str(finding)
    assert "slot" in str(finding)


def test_a_composite_is_wrapped_whole() -> None:
    """Each phase has its backend, and the wrappers share one count of steps."""
    traffic = Traffic(case(), seed=0)
    wrong, right = BaseTwoLSE(traffic.context), FakeBackend(traffic.context)
    canary = CanaryBackend(HybridAttnBackend(prefill=right, decode=wrong), share=1)
    assert canary.select(ForwardMode.DECODE).serving(traffic.next_batch()) is wrong
    with pytest.raises(CanaryFinding, match="LSE"):
        traffic.run(canary, WITHIN)
    assert canary.select(ForwardMode.EXTEND).checked_steps == canary.checked_steps


class Forgetful(CanaryBackend):
    """The suite fills the pool anew before each step."""

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        self.forget()
        super().init_forward_metadata(batch)

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        self.forget()
        super().init_forward_metadata_out_graph(batch, in_capture)


def test_the_whole_contract_passes_through(day: int) -> None:
    """Every kind of layer and step: trees, items, picks, encoders, window pools, padding."""
    made: list[CanaryBackend] = []

    def factory(context: BackendContext, options: object) -> AttentionBackend:
        sample = CanarySample(layers=9, points=6, slots=4096)
        made.append(Forgetful(TorchNativeBackend(context), share=1, sample=sample))
        return made[-1]

    candidate = replace(find_candidate("torch_native", device="cpu"), factory=factory)
    # `made` keeps the instances, which cases that repeat a step count as growth
    cases = [each for each in candidate.cases({5}) if candidate.admits(each) and not each.repeats]
    outcomes = [run_case(candidate, each) for each in cases[day % 24 :: 24]]
    assert [(each.case, each.message) for each in outcomes if each.status == "failed"] == []
    assert len(outcomes) > 8
    assert sum(each.checked_steps for each in made) > 15


def graphs_over(traffic: Traffic, backend: AttentionBackend) -> GraphRunner:
    layer = traffic.context.layers[0]
    shapes = {
        "q": (layer.tp_q_head_num, layer.query_dim),
        "k": (layer.tp_k_head_num, layer.qk_head_dim),
        "v": (layer.tp_v_head_num, layer.v_head_dim),
    }
    dtype = traffic.setup.random(1).dtype
    runner = GraphRunner(
        backend,
        lambda batch, given: backend.forward(given["q"], given["k"], given["v"], layer, batch),
        GraphConfig(batch_sizes=(4,)),
        devices=RecordingGraphs(),
        inputs={name: ModelInput(dtype=dtype, trailing=shape) for name, shape in shapes.items()},
        progress=iter,
    )
    runner.capture()
    return runner


@pytest.mark.parametrize("faulty", [False, True])
def test_replayed_steps_are_checked_before_the_replay(faulty: bool) -> None:
    """A canary does not disturb captures; slots and rows are compared from replay to replay."""
    traffic = Traffic(case(windows=(None,), graph=True, lse=False), seed=1)
    layer = traffic.context.layers[0]
    canary = CanaryBackend(GraphFakeBackend(traffic.context), share=1)
    runner = graphs_over(traffic, canary)
    assert canary.checked_steps == 0
    pool, checked = traffic.context.token_to_kv_pool, 0

    def run() -> None:
        nonlocal checked
        for number in range(40):
            batch = traffic.next_batch()
            checked += 1
            if batch.forward_mode.is_decode():
                rows, draw = batch.num_tokens, traffic.setup.random
                q = draw(rows, layer.tp_q_head_num, layer.query_dim)
                k, v = (draw(rows, layer.tp_k_head_num, layer.qk_head_dim) for _ in range(2))
                runner.replay(batch, {"q": q, "k": k, "v": v})
            else:
                canary.init_forward_metadata(batch)
                traffic.call(canary, layer, batch)
            if faulty and number > 10:
                pool.get_key_buffer(layer.layer_id)[traffic.live[-1].slots[0]] = number / 8

    if faulty:
        with pytest.raises(CanaryFinding, match="slot"):
            run()
    else:
        run()
    assert canary.checked_steps == checked
