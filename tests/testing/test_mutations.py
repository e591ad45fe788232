"""The suite has to notice every fault that a backend can plausibly have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from attnmux.core import ForwardBatch, InvalidInput, LayerSpec
from attnmux.core.plugin import NONE, Option, one_of
from attnmux.testing import (
    Candidate,
    Disagreement,
    FakeBackend,
    fake_card,
    fake_platform,
    run_case,
    standard_cases,
)
from attnmux.testing.cases.case import case_of, decode
from attnmux.testing.cases.variants import LATENT
from attnmux.testing.fakes.backend import FullMetadata


class OffByOnePage(FakeBackend):
    def key_slots(self, layer: LayerSpec, metadata: FullMetadata, request: int) -> torch.Tensor:
        """Read the page before the last one once more where the last one is full."""
        slots = super().key_slots(layer, metadata, request).clone()
        page_size = self.context.token_to_kv_pool.page_size
        if len(slots) > page_size and len(slots) % page_size == 0:
            slots[-page_size:] = slots[-2 * page_size : -page_size]
        return slots


class WindowOneTooWide(FakeBackend):
    def visible(self, layer: LayerSpec, *args: object) -> torch.Tensor:
        window = layer.sliding_window_size
        return super().visible(
            replace(layer, sliding_window_size=window if window < 0 else window + 1), *args
        )


class ScaleOfTheHeadDim(FakeBackend):
    def attend(self, q, k, v, keep, layer):
        return super().attend(q, k, v, keep, replace(layer, scaling=q.shape[-1] ** -0.5))


class StaleMetadata(FakeBackend):
    def init_forward_metadata_in_graph(self, batch: ForwardBatch) -> None:
        """Keep what an earlier step of the same batch size left behind."""
        if self.full is None or len(self.full.new) != batch.batch_size:
            super().init_forward_metadata_in_graph(batch)


class WrongKVHead(FakeBackend):
    def attend(self, q, k, v, keep, layer):
        """Query head h reads KV head h % Hkv instead of h // group."""
        picked = torch.arange(q.shape[1]) % k.shape[1]
        return super().attend(q, k[:, picked], v[:, picked], keep, layer)


class IgnoredCap(FakeBackend):
    def attend(self, q, k, v, keep, layer):
        return super().attend(q, k, v, keep, replace(layer, logit_cap=0.0))


class BaseTwoLSE(FakeBackend):
    def attend(self, q, k, v, keep, layer):
        out, lse = super().attend(q, k, v, keep, layer)
        return out, lse / math.log(2)


class InvertedMask(FakeBackend):
    def visible(self, layer: LayerSpec, batch: ForwardBatch, *args: object) -> torch.Tensor:
        spec_info = batch.spec_info
        if spec_info is not None and spec_info.custom_mask is not None:
            batch = replace(batch, spec_info=replace(spec_info, custom_mask=~spec_info.custom_mask))
        return super().visible(layer, batch, *args)


class HiddenAncestor(FakeBackend):
    def visible(self, layer: LayerSpec, batch: ForwardBatch, *args: object) -> torch.Tensor:
        """Drafts do not see the root of their tree, only later nodes do."""
        spec_info = batch.spec_info
        if spec_info is not None and spec_info.visible is not None:
            hidden = spec_info.visible.clone()
            hidden[:, 1:, 0] = False
            keep = super().visible(layer, batch, *args)
            keep[:, -hidden.shape[1] :] &= hidden[0]
            return keep
        return super().visible(layer, batch, *args)


class BitsFromTheHighest(FakeBackend):
    def visible(self, layer: LayerSpec, batch: ForwardBatch, *args: object) -> torch.Tensor:
        spec_info = batch.spec_info
        if spec_info is not None and spec_info.visible_bits is not None:
            order = torch.arange(8, dtype=torch.uint8)
            bits = (spec_info.visible_bits.unsqueeze(-1) >> order) & 1
            swapped = (bits.flip(-1) << order).sum(-1, dtype=torch.uint8)
            batch = replace(batch, spec_info=replace(spec_info, visible_bits=swapped))
        return super().visible(layer, batch, *args)


class WindowsOfPlaces(FakeBackend):
    def visible(self, layer: LayerSpec, batch: ForwardBatch, *args: object) -> torch.Tensor:
        """Count a window in places of the row, as under a whole mask."""
        unlimited = replace(layer, sliding_window_size=-1, attention_chunk_size=0)
        keep = super().visible(unlimited, batch, *args)
        batch = replace(batch, spec_info=None)
        outside = super().visible(unlimited, batch, *args) & ~super().visible(layer, batch, *args)
        return keep & ~outside


class PrefixOneShort(FakeBackend):
    def prefix_len(self, metadata: FullMetadata, request: int) -> int:
        return max(super().prefix_len(metadata, request) - 1, 0)


class PaddingRead(FakeBackend):
    def key_slots(self, layer: LayerSpec, metadata: FullMetadata, request: int) -> torch.Tensor:
        """Read what lies behind the last token in its page as if it were the first key."""
        slots = super().key_slots(layer, metadata, request).clone()
        if len(slots) % self.context.token_to_kv_pool.page_size:
            slots[0] = slots[-1] + 1
        return slots


class IgnoredSinks(FakeBackend):
    def attend(self, q, k, v, keep, layer):
        return super().attend(q, k, v, keep, replace(layer, sinks=None))


class SinksOutsideLSE(FakeBackend):
    def attend(self, q, k, v, keep, layer):
        out, _ = super().attend(q, k, v, keep, layer)
        return out, super().attend(q, k, v, keep, replace(layer, sinks=None))[1]


class ChunkAsWindow(FakeBackend):
    def visible(self, layer: LayerSpec, *args: object) -> torch.Tensor:
        window = layer.attention_chunk_size - 1
        layer = replace(layer, attention_chunk_size=0, sliding_window_size=window)
        return super().visible(layer, *args)


class ItemsSeeEachOther(FakeBackend):
    def visible(self, layer: LayerSpec, batch: ForwardBatch, *args: object) -> torch.Tensor:
        return super().visible(layer, replace(batch, multi_item=None), *args)


class DecoderKeysAtRowStart(FakeBackend):
    def key_slots(self, layer: LayerSpec, metadata: FullMetadata, request: int) -> torch.Tensor:
        encoder = torch.zeros_like(metadata.encoder)
        if not layer.is_cross_attention:
            metadata = replace(metadata, encoder=encoder)
        return super().key_slots(layer, metadata, request)


class CausalEncoder(FakeBackend):
    def visible(self, layer: LayerSpec, *args: object) -> torch.Tensor:
        return super().visible(replace(layer, is_causal=True), *args)


class UnaskedWrite(FakeBackend):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        super().save_kv(k, v, layer, batch, k_rope=k_rope)
        self.context.token_to_kv_pool.get_key_buffer(layer.layer_id)[-1] = 0


class FirstTokenSavedAlone(FakeBackend):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        first = replace(batch, out_cache_loc=batch.out_cache_loc[:1])
        v = None if v is None else v[:1]
        k_rope = None if k_rope is None else k_rope[:1]
        super().save_kv(k[:1], v, layer, first, k_rope=k_rope)


class UndefinedPadding(FakeBackend):
    def forward_decode(self, call, batch):
        out = super().forward_decode(call, batch)
        out[batch.req_pool_indices == 0] = torch.nan
        return out


class ScaleOfTheFirstLayer(FakeBackend):
    def attend(self, q, k, v, keep, layer):
        """A plan made once a step knows one scale and one cap."""
        first = self.context.layers[0]
        changes = {"scaling": first.scaling, "logit_cap": first.logit_cap}
        return super().attend(q, k, v, keep, replace(layer, **changes))


class ScalesOfAnotherPool(FakeBackend):
    def read(self, layer: LayerSpec, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """De-quantise what was never quantised."""
        keys, values = super().read(layer, slots)
        return keys * (layer.k_scale or 1), values * (layer.v_scale or 1)


class OwnBuffer(FakeBackend):
    """Returns the same memory at every call."""

    memory: torch.Tensor | None = None

    def _forward(self, *args: object) -> torch.Tensor:
        out = super()._forward(*args)
        if self.memory is None or self.memory.shape != out.shape:
            self.memory = torch.empty_like(out)
        return self.memory.copy_(out)


class LengthsWrittenOver(FakeBackend):
    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Count the drafts into the batch's own lengths."""
        super().init_forward_metadata_out_graph(batch, in_capture)
        if batch.forward_mode.is_target_verify() and batch.extend_seq_lens is not None:
            batch.seq_lens.add_(batch.extend_seq_lens)


class KeysWrittenOver(FakeBackend):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        super().save_kv(k, v, layer, batch, k_rope=k_rope)
        k.mul_(0.5)


class RowsBesideEachOther(FakeBackend):
    def _forward(self, call, *args):
        """Take the first row's address, and the others' for right behind it."""
        rows = torch.as_strided(call.q, call.q.shape, call.q.contiguous().stride())
        return super()._forward(structs.replace(call, q=rows), *args)


class SinkLostWithoutKeys(FakeBackend):
    def attend(self, q, k, v, keep, layer):
        out, lse = super().attend(q, k, v, keep, layer)
        return out, lse.masked_fill(~keep.any(1, keepdim=True), -torch.inf)


class MaskInsteadOfChunk(FakeBackend):
    def visible(self, layer: LayerSpec, batch: ForwardBatch, *args: object) -> torch.Tensor:
        if batch.spec_info is not None and batch.spec_info.custom_mask is not None:
            layer = replace(layer, attention_chunk_size=0)
        return super().visible(layer, batch, *args)


class EncoderRowsOfTheTokens(FakeBackend):
    def forward_extend(self, call, batch):
        """Cut an encoder's keys, which only the call has, where the new tokens' queries are cut."""
        if call.has_own_kv:
            layer = replace(call.layer, is_cross_attention=False, is_causal=False)
            call = structs.replace(call, layer=layer)
        return super().forward_extend(call, batch)


class SplitsOfTheBatch(FakeBackend):
    def attend(self, q, k, v, keep, layer):
        """Add up in an order that follows from how many requests there are."""
        out, lse = super().attend(q, k, v, keep, layer)
        return out * (1 + 2.0**-7 * (self.full is not None and len(self.full.new) > 1)), lse


class ScalesLeftOut(FakeBackend):
    def read(self, layer: LayerSpec, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().read(replace(layer, k_scale=None, v_scale=None), slots)


class ScalesOfTheFirstLayer(FakeBackend):
    def read(self, layer: LayerSpec, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.context.layers[0]
        return super().read(replace(layer, k_scale=first.k_scale, v_scale=first.v_scale), slots)


class LatentValuesByVScale(FakeBackend):
    def read(self, layer: LayerSpec, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().read(layer, slots)
        if layer.kind == "mla" and layer.k_scale and layer.v_scale:
            values = values / layer.k_scale * layer.v_scale
        return keys, values


class WrittenWithoutScale(FakeBackend):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        super().save_kv(k, v, replace(layer, k_scale=None, v_scale=None), batch, k_rope=k_rope)


class OverflowIsNaN(FakeBackend):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        """Round with a cast that has no limit."""
        limit = torch.finfo(self.context.token_to_kv_pool.dtype).max
        k = k.masked_fill(k.abs() / (layer.k_scale or 1) > limit, torch.nan)
        super().save_kv(k, v, layer, batch, k_rope=k_rope)


class NewTokensUnrounded(FakeBackend):
    """Attends to the new tokens' own K and V instead of what the pool holds of them."""

    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        super().save_kv(k, v, layer, batch, k_rope=k_rope)
        self.new = {int(slot): row for row, slot in enumerate(batch.out_cache_loc)}, k, v

    def read(self, layer: LayerSpec, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().read(layer, slots)
        rows, k, v = self.new
        for place, slot in enumerate(slots.tolist()):
            if slot in rows:
                keys[place], values[place] = k[rows[slot]].double(), v[rows[slot]].double()
        return keys, values


class SlotsOfTheTable(FakeBackend):
    def read(self, layer: LayerSpec, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the window's buffer at the numbers that the request table has."""
        keys, values = self.context.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        slots = slots % len(keys)
        return keys[slots].double(), values[slots].double()


class SlotsOfTheFirstLayer(FakeBackend):
    def read(self, layer: LayerSpec, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Translate once a step for all layers."""
        pool, first = self.context.token_to_kv_pool, self.context.layers[0]
        keys, values = pool.get_kv_buffer(layer.layer_id)
        slots = pool.translate(slots, first.layer_id)
        return keys[slots].double(), values[slots].double()


class WindowWrittenUntranslated(FakeBackend):
    def save_kv(self, k, v, layer, batch, *, k_rope=None) -> None:
        """Write as to a pool without translation."""
        keys, values = self.context.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        loc = batch.out_cache_loc % len(keys)
        keys[loc], values[loc] = k, v


class ProductsOfEightBits(FakeBackend):
    def attend(self, q, k, v, keep, layer):
        """Round the softmax's weights to the pool's dtype, relative to each row's largest."""
        kv_dtype = self.context.token_to_kv_pool.dtype
        logits = torch.einsum("thd,shd->ths", q.double(), k.repeat_interleave(4, dim=1))
        logits = (logits * layer.scaling).masked_fill(~keep.unsqueeze(1), -torch.inf)
        weights = torch.exp(logits - logits.amax(-1, keepdim=True))
        total = weights.sum(-1)
        rounded = weights.float().to(kv_dtype).double()
        out = torch.einsum("ths,shd->thd", rounded, v.repeat_interleave(4, dim=1))
        return out / total.unsqueeze(-1), torch.logsumexp(logits, -1)


class AllKeysSeen(FakeBackend):
    def visible(self, layer, batch, *args):
        return super().visible(layer, replace(batch, topk_indices=None), *args)


class PicksOfTheFirstLayer(FakeBackend):
    """Kept for the layers that follow, whose indexers pick others."""

    kept: torch.Tensor | None = None

    def visible(self, layer, batch, *args):
        if layer.layer_id == self.context.layers[0].layer_id:
            self.kept = batch.topk_indices.clone()
        return super().visible(layer, replace(batch, topk_indices=self.kept), *args)


class NoKeyIsTheLast(FakeBackend):
    """-1 as Python has it."""

    def visible(self, layer, batch, request, rows, first, num_keys, mask_start):
        picks = torch.where(batch.topk_indices < 0, num_keys - 1, batch.topk_indices)
        batch = replace(batch, topk_indices=picks)
        return super().visible(layer, batch, request, rows, first, num_keys, mask_start)


class PicksUpToTheFirstGap(FakeBackend):
    """Reads keys up to the first -1."""

    def visible(self, layer, batch, *args):
        picks = batch.topk_indices
        gone = (picks < 0).cumsum(1) > 0
        batch = replace(batch, topk_indices=picks.masked_fill(gone, -1))
        return super().visible(layer, batch, *args)


class PicksWrittenOver(FakeBackend):
    def forward_decode(self, call, batch):
        out = super().forward_decode(call, batch)
        batch.topk_indices.clamp_(min=0)
        return out


CAUGHT_BY: dict[type[FakeBackend], tuple[str, ...]] = {
    OffByOnePage: ("decode-page-boundaries", "extend-page-boundaries", "extend-max-length"),
    WindowOneTooWide: ("decode-window", "extend-window", "decode-two-windows"),
    ScaleOfTheHeadDim: ("decode-scale", "extend-scale", "mla-decode"),
    StaleMetadata: ("decode-uneven", "extend-prefix", "verify-chain", "decode-one-request"),
    WrongKVHead: ("decode-one-request", "extend-one-request", "decode-14x2-heads"),
    IgnoredCap: ("decode-cap", "extend-cap", "decode-window-cap"),
    BaseTwoLSE: ("decode-lse", "extend-lse", "mla-decode-lse"),
    InvertedMask: ("verify-tree", "verify-tree-window", "mla-verify-tree"),
    HiddenAncestor: ("verify-tree-qlen", "verify-tree-qlen-padding", "mla-verify-tree-qlen"),
    BitsFromTheHighest: ("verify-tree-bits", "verify-tree-bits-chunk"),
    WindowsOfPlaces: ("verify-tree-qlen-window", "verify-tree-qlen-narrow-window"),
    PrefixOneShort: ("extend-prefix", "mixed", "verify-chain", "draft-extend"),
    PaddingRead: ("decode-one-request", "extend-partly-filled-page", "mla-decode"),
    IgnoredSinks: ("decode-sinks", "extend-sinks"),
    SinksOutsideLSE: ("decode-sinks-lse", "extend-sinks-lse"),
    ChunkAsWindow: ("decode-chunk", "extend-chunk"),
    ItemsSeeEachOther: ("extend-multi-item",),
    DecoderKeysAtRowStart: ("extend-cross", "decode-cross"),
    CausalEncoder: ("encoder", "encoder-dim-64"),
    UnaskedWrite: ("decode-one-request", "extend-cross", "extend-partly-filled-page"),
    FirstTokenSavedAlone: ("decode-uneven", "extend-one-request", "mla-extend"),
    UndefinedPadding: ("decode-padding", "mla-decode-padding"),
    ScaleOfTheFirstLayer: ("decode-scale", "extend-cap"),
    ScalesOfAnotherPool: ("decode-kv-scales", "extend-kv-scales"),
    OwnBuffer: ("decode-uneven", "extend-prefix"),
    LengthsWrittenOver: ("verify-chain", "verify-tree"),
    KeysWrittenOver: ("decode-uneven", "mla-extend"),
    RowsBesideEachOther: ("decode-uneven", "extend-one-request"),
    SinkLostWithoutKeys: ("decode-sinks-lse-of-nothing",),
    MaskInsteadOfChunk: ("verify-tree-chunk",),
    SplitsOfTheBatch: ("decode-deterministic", "extend-deterministic"),
    EncoderRowsOfTheTokens: ("extend-cross-unsaved",),
    ScalesLeftOut: ("decode-fp8_e4m3-scales", "extend-fp8_e5m2-scales", "mla-decode-fp8_e4m3"),
    ScalesOfTheFirstLayer: ("decode-fp8_e4m3-scales", "mla-extend-fp8_e5m2"),
    LatentValuesByVScale: ("mla-decode-fp8_e4m3", "mla-verify-fp8_e5m2"),
    WrittenWithoutScale: ("extend-fp8_e4m3-scales", "mla-extend-fp8_e4m3"),
    OverflowIsNaN: ("extend-fp8_e4m3-saturated", "decode-fp8_e5m2-saturated"),
    NewTokensUnrounded: ("extend-fp8_e4m3", "extend-fp8_e5m2-scales", "decode-fp8_e4m3"),
    SlotsOfTheTable: ("decode-window-pool", "extend-window-pool", "verify-window-pool"),
    SlotsOfTheFirstLayer: ("decode-window-pool", "extend-two-windows-pool"),
    WindowWrittenUntranslated: ("decode-window-pool", "extend-window-pool-shared-prefix"),
    AllKeysSeen: ("nsa-decode", "nsa-extend", "nsa-verify-chain", "nsa-extend-unsaved"),
    PicksOfTheFirstLayer: ("nsa-decode", "nsa-extend"),
    NoKeyIsTheLast: ("nsa-decode", "nsa-extend"),
    PicksUpToTheFirstGap: ("nsa-decode-fewer-than-topk", "nsa-extend"),
    PicksWrittenOver: ("nsa-decode",),
    ProductsOfEightBits: ("decode-fp8_e4m3", "extend-fp8_e5m2"),
}
"""The cases, at page size 16 where they have pages, that each fault fails."""

CASES = {case.name: case for case in standard_cases((16,))}


@pytest.mark.parametrize(
    ("fault", "name"),
    [(fault, name) for fault, names in CAUGHT_BY.items() for name in names],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.turns(9)
def test_catches(fault: type[FakeBackend], name: str) -> None:
    case = CASES.get(f"{name}-page16") or CASES[f"{name}-page1"]
    broken = Candidate(card=fake_card(), platform=fake_platform(), factory=fault)
    whole = Candidate(card=fake_card(), platform=fake_platform())
    outcome = run_case(broken, case)
    assert outcome.status == "failed"
    assert isinstance(outcome.error, Disagreement), outcome.message
    assert run_case(whole, case).status == "passed"


@pytest.mark.parametrize("name", ["decode-fp8_e4m3", "extend-fp8_e5m2", "extend-fp8_e4m3-scales"])
def test_a_card_may_say_that_products_are_of_eight_bits(name: str) -> None:
    card = replace(fake_card(), fp8_products=True)
    case = CASES[f"{name}-page16"]
    candidate = Candidate(card=card, platform=fake_platform(), factory=ProductsOfEightBits)
    assert run_case(candidate, case).status == "passed"
    careless = Candidate(card=card, platform=fake_platform(), factory=ScaleOfTheHeadDim)
    assert run_case(careless, replace(case, scaling=0.3)).status == "failed"


def test_an_option_may_say_that_products_are_of_eight_bits() -> None:
    option = Option(name="fp8_products", type=bool, default=False)
    card = replace(fake_card(), options=(option,))
    case = CASES["decode-fp8_e4m3-page16"]
    candidate = Candidate(card=card, platform=fake_platform(), factory=ProductsOfEightBits)
    assert run_case(candidate, case).status == "failed"
    assert run_case(replace(candidate, options={"fp8_products": True}), case).status == "passed"


class SumsOfFourteenBits(FakeBackend):
    """Logits as matrix units for 8-bit floats add them: 32 products at a time, each truncated to 14
    bits of the largest."""

    def attend(self, q, k, v, keep, layer):
        group = layer.tp_q_head_num // layer.tp_k_head_num
        pool = self.context.token_to_kv_pool
        k_scale = pool.read_scales(layer.k_scale, layer.v_scale)[0]
        total = torch.zeros(q.shape[0], q.shape[1], k.shape[0], dtype=torch.float64)
        keys = (k / k_scale).repeat_interleave(group, dim=1)
        for start in range(0, q.shape[-1], 32):
            part = slice(start, start + 32)
            products = torch.einsum("thd,shd->thsd", q[..., part].double(), keys[..., part])
            terms = torch.cat([products, total.unsqueeze(-1)], -1)
            unit = 2.0 ** (terms.abs().amax(-1, keepdim=True).log2().floor() - 13)
            total = ((terms / unit).trunc() * unit).sum(-1)
        logits = (total * k_scale * layer.scaling).masked_fill(~keep.unsqueeze(1), -torch.inf)
        out, _ = super().attend(q, k, v, keep, layer)
        return out, self.lse_of(logits)

    def lse_of(self, logits):
        return torch.logsumexp(logits, -1)


class WithoutTheFirstKey(SumsOfFourteenBits):
    def lse_of(self, logits):
        return torch.logsumexp(logits[..., 1:], -1)


class HalfAnLSE(SumsOfFourteenBits):
    """Of one of two splits."""

    def lse_of(self, logits):
        return torch.logsumexp(logits[..., : (logits.shape[-1] + 1) // 2], -1)


class BaseTwoSums(SumsOfFourteenBits):
    def lse_of(self, logits):
        return super().lse_of(logits) / math.log(2)


FP8_LATENTS = case_of(
    "mla-decode-lse-fp8",
    16,
    decode(1, 1, 2, 33),  # an LSE of one logit may be near 0, where sums of large products cancel
    **{**LATENT, "num_q_heads": 64},
    dtype="float16",
    kv_dtype="fp8_e4m3",
    scaling=8 * 576**-0.5,
    lse=True,
)


def test_an_lse_of_products_of_eight_bits_has_the_error_of_their_sums() -> None:
    """A backend whose card does not say so fails."""
    card = replace(fake_card(), fp8_products=True)
    right = Candidate(card=card, platform=fake_platform(), factory=SumsOfFourteenBits)
    outcome = run_case(right, FP8_LATENTS)
    assert outcome.status == "passed", outcome.message
    silent = Candidate(card=fake_card(), platform=fake_platform(), factory=SumsOfFourteenBits)
    outcome = run_case(silent, FP8_LATENTS)
    assert outcome.status == "failed"
    assert "LSE" in outcome.message


@pytest.mark.parametrize(
    "fault", [WithoutTheFirstKey, HalfAnLSE, BaseTwoSums], ids=lambda fault: fault.__name__
)
def test_a_wrong_lse_of_products_of_eight_bits_fails(fault: type[FakeBackend]) -> None:
    card = replace(fake_card(), fp8_products=True)
    outcome = run_case(Candidate(card=card, platform=fake_platform(), factory=fault), FP8_LATENTS)
    assert outcome.status == "failed"
    assert "LSE" in outcome.message


class ReadsPagesAlone(FakeBackend):
    def forward_extend(self, call, batch):
        if call.has_own_kv:
            raise InvalidInput("save_kv_cache", got=False, expected="True")
        return super().forward_extend(call, batch)


@pytest.mark.parametrize("name", ["mla-unsaved", "nsa-extend-unsaved", "mla-expanded-prefill"])
def test_latent_layers_serve_keys_of_the_call(name: str) -> None:
    """As the contract says."""
    broken = Candidate(card=fake_card(), platform=fake_platform(), factory=ReadsPagesAlone)
    outcome = run_case(broken, CASES[f"{name}-page16"])
    assert outcome.status == "failed"
    assert "save_kv_cache" in outcome.message


def test_reports_an_exception_as_a_failure() -> None:
    class Raising(FakeBackend):
        def attend(self, *args: object) -> tuple[torch.Tensor, torch.Tensor]:
            raise ZeroDivisionError("no kernel")

    broken = Candidate(card=fake_card(), platform=fake_platform(), factory=Raising)
    outcome = run_case(broken, CASES["decode-uneven-page16"])
    assert outcome.status == "failed"
    assert outcome.message == "ZeroDivisionError: no kernel"


def test_refuses_what_the_card_does_not_admit() -> None:
    narrow = Candidate(card=fake_card(page_size=one_of(1, 64)), platform=fake_platform())
    outcome = run_case(narrow, CASES["decode-uneven-page16"])
    assert outcome.status == "refused"
    assert [reason.axis for reason in outcome.reasons] == ["page_size"]
    assert run_case(narrow, standard_cases((64,))[0]).status == "passed"


def test_a_backend_that_serves_less_than_its_card_fails() -> None:
    class NoWindow(FakeBackend):
        def visible(self, layer: LayerSpec, *args: object) -> torch.Tensor:
            return super().visible(replace(layer, sliding_window_size=-1), *args)

    claiming = Candidate(card=fake_card(), platform=fake_platform(), factory=NoWindow)
    honest = Candidate(
        card=fake_card(sliding_window=NONE), platform=fake_platform(), factory=NoWindow
    )
    # The fake's card has no 4-bit floats
    wide = [case for case in CASES.values() if case.kv_dtype != "fp4_e2m1"]
    windowed = [case for case in wide if case.request.sliding_window]
    assert windowed
    assert {run_case(claiming, case).status for case in windowed} == {"failed"}
    assert {run_case(honest, case).status for case in windowed} == {"refused"}
