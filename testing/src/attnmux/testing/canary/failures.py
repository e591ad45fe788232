"""Saves a failed step to a folder and loads it again: JSON and tensors, no code."""

from __future__ import annotations

import json
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from attnmux.core import (
    AttentionBackend,
    AttentionCall,
    AttnmuxError,
    BackendContext,
    Decision,
    ForwardBatch,
    ForwardMode,
    InvalidInput,
    KVPool,
    Request,
)
from attnmux.testing.canary.outputs import slots_of
from attnmux.testing.canary.watched import kv_memory
from attnmux.testing.canary.wrapping import WrappingBackend
from attnmux.testing.reference.sampled import RequestView

FORMAT = 1
FACTS, TENSORS = "failure.json", "tensors.pt"
PREFIX = "failure-"
PER_HEAD = ("sinks", "alibi_slopes", "relative_bias")
"""A layer's tensors."""
INPUTS = ("q", "k", "v", "q_rope", "k_rope")


class FailureKeeper(WrappingBackend):
    """Wraps any backend. A step in which it raises is kept in a new folder; the error propagates.

    A kept step has the error, the decision, the layer, the batch with its rows of the request
    table, and the shapes and dtypes of the call's tensors. `attnmux replay` draws their values from
    a seed. With `tensors`, the call's own values and the K and V of its requests are kept too; they
    reveal the users' text. Steps that a device graph replays have no layer call to keep.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        folder: Path,
        *,
        decision: Decision | None = None,
        tensors: bool = False,
        limit: int = 8,
        max_bytes: int = 1 << 30,
        on_kept: Callable[[str], None] | None = None,
    ) -> None:
        """folder: created if missing. Each failure gets a new folder in it, readable by its owner
        only. limit: the most failures that the folder may hold. max_bytes: the most bytes of values
        to keep for a failure; larger ones are left out. on_kept: called with a sentence that names
        the new folder. From Python 3.11 on, that sentence is also added to the error as a note.
        """
        super().__init__(backend)
        self._kept = FailureFolder(
            folder, decision=decision, tensors=tensors, limit=limit, max_bytes=max_bytes
        )
        self._on_kept = on_kept

    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        try:
            self.backend.init_forward_metadata(batch)
        except Exception as error:
            self._keep(error, "init_forward_metadata", batch)
            raise

    def init_forward_metadata_out_graph(
        self, batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        try:
            self.backend.init_forward_metadata_out_graph(batch, in_capture)
        except Exception as error:
            if not in_capture:
                self._keep(error, "init_forward_metadata_out_graph", batch)
            raise

    def forward_decode(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        try:
            return self.backend.forward_decode(call, batch)
        except Exception as error:
            self._keep(error, "forward_decode", batch, call)
            raise

    def forward_extend(self, call: AttentionCall, batch: ForwardBatch) -> torch.Tensor:
        try:
            return self.backend.forward_extend(call, batch)
        except Exception as error:
            self._keep(error, "forward_extend", batch, call)
            raise

    def _keep(
        self,
        error: Exception,
        method: str,
        batch: ForwardBatch,
        call: AttentionCall | None = None,
    ) -> None:
        said = self._kept.keep(self.context, error, method, batch, call)
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(said)
        if self._on_kept is not None:
            self._on_kept(said)


class FailureFolder:
    """A folder of failed steps, each in a new folder that its owner alone can read."""

    def __init__(
        self,
        folder: Path,
        *,
        decision: Decision | None = None,
        tensors: bool = False,
        limit: int = 8,
        max_bytes: int = 1 << 30,
    ) -> None:
        """See `FailureKeeper`."""
        self._folder, self._decision, self._tensors = folder, decision, tensors
        self._limit, self._max_bytes = limit, max_bytes

    def keep(
        self,
        context: BackendContext,
        error: Exception,
        method: str,
        batch: ForwardBatch,
        call: AttentionCall | None = None,
        request: RequestView | None = None,
    ) -> str:
        """Keep a step that failed in that method of the backend. Returns a sentence that names the
        new folder, or says why the step is not kept.

        request: the only one whose K and V are read. Never raises, since that would hide the
        step's own error.
        """
        try:
            return self._write(context, error, method, batch, call, request)
        except Exception as problem:  # e.g. a full disk, or a device that is lost
            why = AttnmuxError.in_brief(problem)
            return f"the failed step could not be kept in {self._folder}: {why}"

    def _write(
        self,
        context: BackendContext,
        error: Exception,
        method: str,
        batch: ForwardBatch,
        call: AttentionCall | None,
        request: RequestView | None,
    ) -> str:
        self._folder.mkdir(parents=True, exist_ok=True)
        held = sum(each.name.startswith(PREFIX) for each in self._folder.iterdir())
        if held >= self._limit:
            return f"the failed step is not kept: {self._folder} holds {held} failures already"
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._folder))
        facts = self._facts(context, error, method, batch, call)
        tensors = _batch_tensors(batch)
        tensors["req_to_token"] = _table(context, batch)
        layer = context.layers[0] if call is None else call.layer
        for name in PER_HEAD:
            of_heads = getattr(layer, name)
            if of_heads is not None:
                tensors[name] = of_heads
        values = {}
        if self._tensors and call is not None:
            values = _values(context, call, tensors["req_to_token"], request)
        size = sum(each.nbytes for each in values.values())
        if size <= self._max_bytes:
            tensors |= values
        elif values:
            facts["left_out"] = f"values of {size} bytes, above the limit of {self._max_bytes}"
        (path / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        kept = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        torch.save(kept, path / TENSORS)
        return f"the failed step is kept in {path}: attnmux replay {path}"

    def _facts(
        self,
        context: BackendContext,
        error: Exception,
        method: str,
        batch: ForwardBatch,
        call: AttentionCall | None,
    ) -> dict[str, Any]:
        layer = context.layers[0] if call is None else call.layer
        pool = context.token_to_kv_pool.of_layers((layer.layer_id,))
        shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return {
            "format": FORMAT,
            "error": {"type": type(error).__name__, "message": str(error), "traceback": shown},
            "method": method,
            "decision": None if self._decision is None else self._decision.to_dict(),
            "request": context.request.to_dict(),
            "platform": context.platform.to_dict(),
            "device": str(context.device),
            "page_size": pool.page_size,
            "kv_dtype": Request.canonical_dtype(pool.dtype),
            "max_batch_size": context.max_batch_size,
            "max_context_len": context.max_context_len,
            "layer": _scalars(layer, skip=PER_HEAD),
            "batch": {
                "forward_mode": batch.forward_mode.name,
                **_scalars(batch, skip=("forward_mode", "actual_forward_mode", "tbo_children")),
            },
            "spec_info": None if batch.spec_info is None else _scalars(batch.spec_info),
            "call": None if call is None else _shapes(call),
            "seed": 0,
            "torch_seed": torch.initial_seed(),
            "torch": torch.__version__,
        }


def _table(context: BackendContext, batch: ForwardBatch) -> torch.Tensor:
    """[B, longest] int32: the requests' rows, 0 after their ends."""
    ends = batch.seq_lens.long()
    if batch.forward_mode.is_target_verify() and batch.extend_seq_lens is not None:
        ends = ends + batch.extend_seq_lens
    if batch.encoder_lens is not None:
        ends = ends + batch.encoder_lens
    most = context.req_to_token_pool.max_context_len
    width = min(int(ends.max()) if len(ends) else 0, most)
    rows = slots_of(context, batch.req_pool_indices, width).int()
    columns = torch.arange(width, device=rows.device)
    return rows.masked_fill(columns >= ends.unsqueeze(1), 0)


def _values(
    context: BackendContext, call: AttentionCall, table: torch.Tensor, request: RequestView | None
) -> dict[str, torch.Tensor]:
    """The call's tensors, and the layer's K and V at the slots of the table.

    request: the only one whose slots are read; `kv_places` then has their places in the flattened
    table.
    """
    pool, layer_id = context.token_to_kv_pool, call.layer.layer_id
    found = {f"call.{name}": getattr(call, name) for name in INPUTS}
    values = {name: each for name, each in found.items() if each is not None}
    if layer_id not in pool.layer_ids:
        return values
    slots = table.flatten().long()
    if request is not None:
        width = table.shape[1]
        values["kv_places"] = torch.arange(width, device=table.device) + request.index * width
        slots = slots[values["kv_places"]]
    slots = pool.translate(slots, layer_id)
    for index, buffer in enumerate(kv_memory(pool, layer_id)):
        values[f"kv.{index}"] = KVPool.gather_rows(buffer, slots)
    return values


def _batch_tensors(batch: ForwardBatch) -> dict[str, torch.Tensor]:
    """Tensors of the batch by "field", "spec_info.field" and "multi_item.field"."""
    parts = (("", batch), ("spec_info.", batch.spec_info), ("multi_item.", batch.multi_item))
    return {
        prefix + item.name: value
        for prefix, part in parts
        if part is not None
        for item in fields(part)
        if isinstance(value := getattr(part, item.name), torch.Tensor)
    }


def _scalars(facts: Any, skip: tuple[str, ...] = ()) -> dict[str, Any]:  # noqa: ANN401  # a dataclass
    return {
        item.name: value
        for item in fields(facts)
        if item.name not in skip
        and isinstance(value := getattr(facts, item.name), (int, float, str, bool))
    }


def _shapes(call: AttentionCall) -> dict[str, Any]:
    tensors = {name: getattr(call, name) for name in INPUTS}
    return {
        "save_kv_cache": call.save_kv_cache,
        "lse": call.lse is not None,
        "out": call.out is not None,
        "tensors": {
            name: {"shape": list(each.shape), "dtype": Request.canonical_dtype(each.dtype)}
            for name, each in tensors.items()
            if each is not None
        },
    }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KeptFailure:
    """A failure that was read from its folder."""

    facts: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]

    @property
    def backend(self) -> str:
        """The backend that was chosen for the step's phase; empty without a decision."""
        phases = (self.facts["decision"] or {}).get("phases", {})
        decodes = self.facts["batch"]["forward_mode"] == ForwardMode.DECODE.name
        choice = phases.get("decode" if decodes else "extend")
        return "" if choice is None else f"{choice['plugin']}/{choice['backend']}"

    @property
    def has_values(self) -> bool:
        return "call.q" in self.tensors


def load_failure(folder: Path) -> KeptFailure:
    """Read a folder that `FailureKeeper` made. Loads only data, never code.

    Raises InvalidInput for any other folder.
    """
    try:
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        tensors = torch.load(folder / TENSORS, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError) as error:
        # torch's message suggests loading code
        reason = type(error).__name__
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
        expected = "a folder that --keep-failures made"
        raise InvalidInput("FOLDER", got=f"{folder} ({reason})", expected=expected) from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT:
        raise InvalidInput("FOLDER", got=str(folder), expected=f"a failure of format {FORMAT}")
    return KeptFailure(facts=facts, tensors=tensors)
