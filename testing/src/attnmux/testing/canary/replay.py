"""`attnmux replay FOLDER`: runs a kept failure again and compares it with the reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import click
import torch

from attnmux.core import (
    BackendContext,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    KVPool,
    LayerSpec,
    MHATokenToKVPool,
    MLATokenToKVPool,
    MultiItem,
    ReqToTokenPool,
    Request,
    SpecInput,
    Workspace,
    torch_dtype,
)
from attnmux.core.verbs import Run, common_options
from attnmux.testing import reference
from attnmux.testing.canary.failures import PER_HEAD, KeptFailure, load_failure
from attnmux.testing.canary.watched import kv_memory
from attnmux.testing.run.candidate import Candidate, find_candidate
from attnmux.testing.run.comparison import Disagreement, compare, lse_tolerance, output_tolerance
from attnmux.testing.setup.placement import put


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The outcome of the repeated step."""

    error: str = ""
    """The backend's exception, or the difference from the reference; empty if they agree."""
    raised: bool = False
    max_error: float = 0.0


def run_again(kept: KeptFailure, candidate: Candidate) -> Replayed:
    """Run the failed layer's step eagerly on a candidate, and compare it with the reference.

    The step gets a small pool of its own. Its pages are renumbered in the same order.
    """
    made = _Remade(kept, candidate)
    layer, batch, given = made.layer, made.batch, made.inputs
    facts = kept.facts["call"] or {"save_kv_cache": True, "lse": False}
    lse = torch.zeros(given["q"].shape[:2], device=made.device) if facts["lse"] else None
    parts = {name: given.get(name) for name in ("q_rope", "k_rope")}
    saves = bool(facts["save_kv_cache"])
    try:
        backend = candidate.build(made.context)
        backend.init_forward_metadata(batch)
        out = backend.forward(
            given["q"], given.get("k"), given.get("v"), layer, batch, saves, lse=lse, **parts
        )
    except Exception as error:  # a backend may raise anything
        return Replayed(error=f"{type(error).__name__}: {error}", raised=True)
    unsaved = {} if saves else {"k": given.get("k"), "v": given.get("v"), "k_rope": parts["k_rope"]}
    table, pool = made.context.req_to_token_pool.req_to_token, made.context.token_to_kv_pool
    expected, expected_lse = reference.attention(
        given["q"], layer, batch, table, pool, q_rope=parts["q_rope"], **unsaved
    )
    eight_bits = pool.dtype in KVPool.FP8_DTYPES
    tolerance = output_tolerance(out.dtype, pool.dtype, fp8_products=eight_bits)
    try:
        worst = compare("output", out, expected, tolerance)
        if lse is not None:
            tolerance = lse_tolerance(
                layer, out.dtype, pool.dtype, fp8_products=eight_bits, rounds_q=True
            )
            worst = max(worst, compare("LSE", lse, expected_lse, tolerance))
    except Disagreement as difference:
        return Replayed(error=str(difference))
    return Replayed(max_error=worst)


class _Remade:
    """The kept step, rebuilt in pools of its own on the candidate's device."""

    def __init__(self, kept: KeptFailure, candidate: Candidate) -> None:
        facts, self.device = kept.facts, torch.device(candidate.device)
        self._kept = kept
        self._generator = torch.Generator().manual_seed(facts["seed"])
        of_heads: dict[str, Any] = {name: self._tensor(name) for name in PER_HEAD}
        self.layer = LayerSpec(**facts["layer"], **of_heads)
        page = facts["page_size"]
        table = kept.tensors["req_to_token"].long()
        loc = kept.tensors["out_cache_loc"]
        encoder_loc = kept.tensors.get("encoder_out_cache_loc", loc[:0])
        pages = torch.cat([table.flatten(), loc, encoder_loc]).div(page, rounding_mode="floor")
        self._pages = torch.unique(pages)
        self._pages = self._pages[self._pages > 0]
        pool = self._pool(page, max(len(self._pages), 1) * page)
        rows = kept.tensors["req_pool_indices"]
        own_rows = torch.unique(rows)
        own_rows = own_rows[own_rows > 0]
        max_len = max(facts["max_context_len"], table.shape[1])
        requests = ReqToTokenPool(max(len(own_rows), 1), max_len, self.device)
        new_rows = torch.where(rows > 0, torch.searchsorted(own_rows, rows) + 1, 0)
        slots = self._renumbered(table, page)
        requests.req_to_token[new_rows.to(self.device), : table.shape[1]] = slots.int()
        self.context = BackendContext(
            request=Request.from_dict(facts["request"]),
            platform=candidate.platform,
            device=self.device,
            layers=(self.layer,),
            req_to_token_pool=requests,
            token_to_kv_pool=pool,
            workspace=Workspace(self.device),
            max_batch_size=facts["max_batch_size"],
            max_context_len=max_len,
            launches=candidate.launches,
        )
        self._fill(pool, slots.flatten())
        self.batch = self._batch(new_rows, page)
        self.inputs = self._inputs()

    def _tensor(self, name: str) -> torch.Tensor | None:
        found = self._kept.tensors.get(name)
        return None if found is None else found.to(self.device)

    def _renumbered(self, slots: torch.Tensor, page: int) -> torch.Tensor:
        pages = torch.searchsorted(self._pages, slots // page) + 1
        return torch.where(slots >= page, pages * page + slots % page, 0).to(self.device)

    def _pool(self, page: int, size: int) -> KVPool:
        layer = self.layer
        given: dict[str, Any] = {
            "size": size,
            "page_size": page,
            "dtype": torch_dtype(self._kept.facts["kv_dtype"]),
            "layer_ids": [layer.layer_id],
            "device": self.device,
        }
        if layer.kind == "mla":
            rope = layer.qk_rope_head_dim
            return MLATokenToKVPool(**given, kv_lora_rank=layer.v_head_dim, qk_rope_head_dim=rope)
        return MHATokenToKVPool(
            **given,
            num_kv_heads=layer.tp_k_head_num,
            head_dim=layer.qk_head_dim,
            v_head_dim=layer.v_head_dim,
        )

    def _fill(self, pool: KVPool, slots: torch.Tensor) -> None:
        """Write random K and V, and those that were kept in their places."""
        layer = self.layer
        memory = kv_memory(pool, layer.layer_id)
        kept = [self._tensor(f"kv.{index}") for index in range(len(memory))]
        widths = (layer.qk_head_dim, layer.v_head_dim)[: len(memory)]
        drawn = [self._random(len(slots), layer.tp_k_head_num, width) for width in widths]
        parts = zip(*(KVPool.stored_parts(rows, pool.dtype, None) for rows in drawn), strict=True)
        made = chain.from_iterable(parts)
        places = self._tensor("kv_places")
        for buffer, rows, drawn_rows in zip(memory, kept, made, strict=True):
            if rows is None or places is not None:
                put(buffer, slots, drawn_rows)
            if rows is not None:
                put(buffer, slots if places is None else slots[places], rows)

    def _batch(self, rows: torch.Tensor, page: int) -> ForwardBatch:
        facts = self._kept.facts
        names = [name for name in self._kept.tensors if name in ForwardBatch.__dataclass_fields__]
        given: dict[str, Any] = {**facts["batch"], **{name: self._tensor(name) for name in names}}
        given |= {name: self._kept.tensors[name] for name in names if name.endswith("_cpu")}
        given["forward_mode"] = ForwardMode[facts["batch"]["forward_mode"]]
        given["req_pool_indices"] = rows.to(self.device)
        for name in ("out_cache_loc", "encoder_out_cache_loc"):
            if name in names:
                given[name] = self._renumbered(self._kept.tensors[name], page)
        if facts["spec_info"] is not None:
            given["spec_info"] = SpecInput(
                **facts["spec_info"],
                custom_mask=self._tensor("spec_info.custom_mask"),
                mask_indptr=self._tensor("spec_info.mask_indptr"),
                visible=self._tensor("spec_info.visible"),
                visible_bits=self._tensor("spec_info.visible_bits"),
            )
        items = self._tensor("multi_item.prefix_lens")
        if items is not None:
            places = self._kept.tensors["multi_item.token_pos_in_items"].to(self.device)
            given["multi_item"] = MultiItem(prefix_lens=items, token_pos_in_items=places)
        return ForwardBatch(**given)

    def _inputs(self) -> dict[str, torch.Tensor]:
        call, layer, tokens = self._kept.facts["call"], self.layer, self.batch.num_tokens
        if call is None:
            dtype = self._kept.facts["request"]["dtype"] or "bfloat16"
            shape = [tokens, layer.tp_q_head_num, layer.query_dim]
            shapes = {"q": {"shape": shape, "dtype": dtype}}
            if layer.qk_rope_head_dim:
                shape = [tokens, layer.tp_q_head_num, layer.qk_rope_head_dim]
                shapes["q_rope"] = {"shape": shape, "dtype": dtype}
            call = {"tensors": shapes}
        drawn = {}
        for name, each in call["tensors"].items():
            value = self._random(*each["shape"]).to(torch_dtype(each["dtype"]))
            kept = self._tensor(f"call.{name}")
            drawn[name] = value if kept is None else kept
        return drawn

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--backend", default="", help="Another backend than the one that failed.")
@click.option("--device", default="", help="torch's name: cpu, cuda:1, … [default: by the card]")
@common_options
def replay(run: Run, folder: Path, backend: str, device: str, as_json: bool) -> int:
    """Run the failed step in FOLDER again and compare it with the reference.

    FOLDER is one that `generate --keep-failures` or an engine's canary made. Exits with 0 when the
    result agrees, 1 when the backend raises or disagrees, 2 when there is nothing to run.
    """
    kept = load_failure(folder)
    name = backend or kept.backend
    if not name:
        raise InvalidInput("--backend", got="nothing", expected="a name: no decision was kept")
    settings = run.settings()
    plugins = run.plugins(settings)
    candidate = find_candidate(
        name,
        device=device,
        plugins=plugins,
        platforms=run.detect(plugins).platforms,
        launches=run.launches(settings),
    )
    request = Request.from_dict(kept.facts["request"])
    reasons = candidate.refusals(replace(request, phases=(_phase(kept),)))
    if reasons:
        run.warn(f"the card of {candidate.card.name} does not admit the step: {reasons[0]}")
    done = run_again(kept, candidate)
    if as_json:
        answer = {"failure": kept.facts["error"], "backend": candidate.card.name}
        outcome = {"error": done.error, "raised": done.raised, "max_error": done.max_error}
        run.echo_json(
            {**answer, "values_kept": kept.has_values, **outcome, "warnings": run.warnings}
        )
        return int(bool(done.error))
    error = kept.facts["error"]
    layer, mode = kept.facts["layer"]["layer_id"], kept.facts["batch"]["forward_mode"]
    values = "the kept values" if kept.has_values else f"random values, seed {kept.facts['seed']}"
    click.echo(f"kept: {error['type']}: {error['message']}")
    click.echo(f"step: {mode} of {kept.facts['batch']['batch_size']} requests, layer {layer}")
    if done.raised:
        click.echo(f"{candidate.card.name}, {values}: raises {done.error}")
    elif done.error:
        click.echo(f"{candidate.card.name}, {values}: differs from the reference: {done.error}")
    else:
        said = f"agrees with the reference (largest error {done.max_error:.2g})"
        click.echo(f"{candidate.card.name}, {values}: {said}")
    return int(bool(done.error))


def _phase(kept: KeptFailure) -> str:
    mode = ForwardMode[kept.facts["batch"]["forward_mode"]]
    if mode.is_target_verify():
        return "verify"
    if mode.is_draft_extend():
        return "draft"
    return "extend" if mode.is_extend() else "decode"
