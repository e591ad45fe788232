"""The attention backend that SGLang calls, around one of attnmux."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend as SglangBackend
from sglang.srt.model_executor.cuda_graph_config import Backend as GraphBackend
from sglang.srt.model_executor.cuda_graph_config import Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_spec

from attnmux.core import (
    AttentionBackend,
    AttnmuxError,
    BackendContext,
    BackendFailed,
    Chooser,
    Decision,
    ForwardBatch,
    GraphUnsupported,
    InvalidInput,
    LayerSpec,
    Request,
    Workspace,
    build,
    make_first,
)
from attnmux.sglang.asking import NAME, asked
from attnmux.sglang.layers import record_layers, request_of, sink_owners
from attnmux.sglang.pools import kv_pool, request_table
from attnmux.sglang.steps import StepBuilder

logger = logging.getLogger(__name__)


class AttnmuxAttnBackend(SglangBackend):  # type: ignore[misc,unused-ignore]  # Any to mypy
    """The backend that `solve` decides on for a runner's layers, device and pools."""

    needs_cpu_seq_lens = True

    def __init__(self, runner: Any, *, draft_step: int | None = None) -> None:  # noqa: ANN401
        """runner: SGLang's ModelRunner, with its model and pools. draft_step: see `StepBuilder`.

        Raises ValueError, as SGLang does for its own backends, with the reasons of every candidate
        if none serves the layers.
        """
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.kv_index_translator = runner.kv_index_translator
        self.device = torch.device(runner.device)
        try:
            self.backend, self.decision = _made(runner, self.device)
        except AttnmuxError as refusal:
            raise ValueError(f"--attention-backend {NAME}: {refusal}") from refusal
        logger.info("attention: %s", self.decision.summary())
        context = self.backend.context
        self._specs = {layer.layer_id: layer for layer in context.layers}
        self._sink_owners = sink_owners(runner, context.layers)
        self._steps = StepBuilder(
            max_batch_size=context.max_batch_size,
            max_num_tokens=context.max_batch_size,
            device=context.token_to_kv_pool.device,
            draft_step=draft_step,
        )
        self._batch: ForwardBatch | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:  # noqa: ANN401  # SGLang's
        self._batch = self._steps.step(forward_batch)
        self._refresh_sinks()
        self.backend.init_forward_metadata(self._batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:  # noqa: ANN401
        self._batch = self._steps.step(forward_batch)
        self.backend.init_forward_metadata_out_graph(self._batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:  # noqa: ANN401
        self._refresh_sinks()
        self.backend.init_forward_metadata_in_graph(self._prepared())

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self._steps.reserve(max_bs, max_num_tokens)
        try:
            self.backend.init_cuda_graph_state(max_bs, max_num_tokens)
        except GraphUnsupported as refusal:
            remedy = "start SGLang with --disable-decode-cuda-graph, or prefer another backend"
            raise ValueError(f"--attention-backend {NAME}: {refusal}; {remedy}") from refusal

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.backend.get_cuda_graph_seq_len_fill_value()

    def support_triton(self) -> bool:
        """Whether SGLang may use Triton's kernels around the attention."""
        return self.device.type != "cpu"

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,  # noqa: ANN401  # SGLang's RadixAttention
        forward_batch: Any,  # noqa: ANN401
        save_kv_cache: bool = True,
        **kwargs: Any,  # noqa: ANN401  # parts of MLA's rows, and sinks
    ) -> torch.Tensor:
        """[T, Hq * Dv]; q [T, Hq * D] and k, v [T, Hkv, D], or MLA's absorbed rows."""
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        spec = self._specs[layer.layer_id]
        q_rope, k_rope = kwargs.pop("q_rope", None), kwargs.pop("k_rope", None)
        _check_rest(spec, kwargs)
        # Waits until HiCache has loaded the layer's rows
        self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        q = q.reshape(q.shape[0], spec.tp_q_head_num, -1)
        if spec.kind == "mla":
            q, q_rope = _parts(q, q_rope, spec)
            v = None
            if k is not None:
                k, k_rope = _parts(k.view(k.shape[0], 1, -1), k_rope, spec)
        elif k is not None and v is not None:
            k = k.view(-1, spec.tp_k_head_num, spec.qk_head_dim)
            v = v.view(-1, spec.tp_v_head_num, spec.v_head_dim)
        # Between the graphs of a prompt's pieces, the rows that the next one reads
        out = forward_batch._attn_output
        if out is not None:
            out = out.view(-1, spec.tp_q_head_num, spec.v_head_dim)
        out = self.backend.forward(
            q, k, v, spec, self._prepared(), save_kv_cache, q_rope=q_rope, k_rope=k_rope, out=out
        )
        return out.view(out.shape[0], -1)

    def _refresh_sinks(self) -> None:
        """SGLang's `update_weights` writes the sinks of the model in place."""
        if self._sink_owners:
            weights = [owner.sinks for owner in self._sink_owners]
            self.backend.refresh_sinks(weights)  # type: ignore[arg-type]  # tensors

    def _prepared(self) -> ForwardBatch:
        if self._batch is None:
            raise InvalidInput("forward_batch", got="no metadata", expected="a prepared step")
        return self._batch


def _parts(
    rows: torch.Tensor, rope: torch.Tensor | None, spec: LayerSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent and the rotary part [T, H, …] of MLA's rows, which come whole or apart."""
    if rope is not None:
        return rows, rope.reshape(rows.shape[0], rows.shape[1], -1)
    return rows[..., : spec.v_head_dim], rows[..., spec.v_head_dim :]


def _check_rest(spec: LayerSpec, kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidInput for arguments that the spec does not cover."""
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    if ("sinks" in given) != (spec.sinks is not None):
        expected = "sinks where, and only where, the layer's module has them"
        raise InvalidInput("sinks", got=f"{'sinks' in given}", expected=expected)
    if given - {"sinks"}:
        expected = "q, k, v, q_rope, k_rope and sinks: take another --attention-backend"
        raise InvalidInput(f"layer {spec.layer_id}", got=sorted(given), expected=expected)


def _made(runner: Any, device: torch.device) -> tuple[AttentionBackend, Decision]:  # noqa: ANN401
    """Raises AttnmuxError if no backend serves the runner."""
    watched = Chooser.canary("attnmux-sglang", logger)
    layers = record_layers(runner)
    is_eager = check_cuda_graph_backend(Phase.DECODE, GraphBackend.DISABLED)
    captures = device.type != "cpu" and not is_eager
    request = asked(request_of(layers, runner, phases=_phases(runner)), captures=captures)
    pool = kv_pool(runner.token_to_kv_pool, layers)
    table = request_table(runner.req_to_token_pool)
    chooser = Chooser.here(device)
    decisions: list[Decision] = []

    def make(decision: Decision) -> AttentionBackend:
        if decision.page_size != pool.page_size:
            expected = f"--page-size {decision.page_size}: {decision.summary()}"
            raise InvalidInput("page_size", got=pool.page_size, expected=expected)
        decisions.append(decision)
        return build(decision, _context(decision.request, chooser))

    def _context(decided: Request, chooser: Chooser) -> BackendContext:
        return BackendContext(
            request=decided,
            platform=chooser.platform,
            device=pool.device,
            layers=layers,
            req_to_token_pool=table,
            token_to_kv_pool=pool,
            workspace=Workspace(pool.device),
            max_batch_size=table.size,
            max_context_len=table.max_context_len,
            launches=chooser.launches,
            debug=chooser.debug,
        )

    backend = make_first(lambda failed: chooser.decide(request, failed), make, _tell)
    return watched(backend, decisions[-1], {}), decisions[-1]


def _phases(runner: Any) -> tuple[str, ...]:  # noqa: ANN401  # SGLang's ModelRunner
    """The phases for which the user named attnmux; empty for all."""
    prefill = runner.prefill_attention_backend_str == NAME
    decode = runner.decode_attention_backend_str == NAME
    if prefill == decode:
        return ()
    own = ("extend",) if prefill else ("decode",)
    mode, spec = "prefill" if prefill else "decode", get_spec()
    if spec.speculative_algorithm is not None and spec.speculative_attention_mode == mode:
        return (*own, "verify", "draft")
    return own


def _tell(failure: BackendFailed, decision: Decision) -> None:
    logger.warning("%s; instead %s", failure, decision.summary())
