"""MLA on flashinfer's wrapper: layers, steps and calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from attnmux.core import ForwardMode, GraphUnsupported, InvalidInput, torch_dtype
from attnmux.core.plugin import KernelLibrary, LatentRows, LibraryBackend, Rows, rehearse
from attnmux.nvidia.flashinfer.shared import HINT, MIB, Staging, workspace, writable_lse
from attnmux.nvidia.flashinfer_mla.kernels import FlashInferMLAKernels, from_flashinfer
from attnmux.nvidia.flashinfer_mla.planning import MOST_HEADS, GraphIndices, Planner, Settings
from attnmux.nvidia.flashinfer_mla.step import FlashInferMLAStep, LatentGroup, Planned

if TYPE_CHECKING:
    from attnmux.core import AttentionCall, BackendContext, ForwardBatch, LayerSpec

WORKSPACE_BYTES = 256 * MIB

LEAST_WORKSPACE_BYTES = 2 * 160 * 64 * (512 * 2 + 4)
"""Bytes that `MLAPlan` in scheduler.cuh takes on the largest devices, of 160 SMs, whatever the
step: for each SM twice 64 rows of partial output and their LSE."""

WIDENED = torch.float8_e4m3fn

CAPTURED = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
"""Modes whose requests have the same number of new tokens in every step. The others' plans would
have other tiles than the captured launch has blocks for: `num_blks_x` in scheduler.cuh is 1 up to a
mean of 64 rows a request, else 2."""

Latents = tuple[torch.Tensor, torch.Tensor]
"""Latent parts [pages, page_size, 512] and rotary parts [pages, page_size, 64]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlashInferMLALayer:
    """A layer's rows in the pool."""

    group: LatentGroup
    latents: Latents
    """The pool's pages."""
    words: torch.Tensor | None
    """[slots, row bytes / 8] int64: rows to be widened. A copy moves words, because it does not
    support 8-bit floats. None if kernels read the pool itself."""
    power: float
    """The power of 2 in the layer's scale, which widened rows are multiplied by: 16 bits hold the
    result exactly."""
    rest: float
    """The rest of the scale, from 1 to 2, by which rows would be rounded. It multiplies queries and
    output instead: plans fix the scale of logits, and one a layer would be a plan a layer."""

    def read(self, slots: torch.Tensor, dtype: torch.dtype) -> Latents:
        """The pool's pages, or copies of the rows at `slots` as pages of one token.

        slots: [keys] int32, read if rows are widened, to `dtype`.
        """
        if self.words is None:
            return self.latents
        rows = self.words.index_select(0, slots).view(WIDENED).to(dtype)
        if self.power != 1:
            rows *= self.power
        return _split(rows.unsqueeze(1))


class FlashInferMLABackend(
    LibraryBackend[FlashInferMLAKernels, FlashInferMLALayer, FlashInferMLAStep, GraphIndices]
):
    """Absorbed MLA, eager and in graphs. A pool of 8-bit floats is read eagerly alone."""

    def __init__(
        self, context: BackendContext, options: Mapping[str, object], kernels: FlashInferMLAKernels
    ) -> None:
        """Raises InvalidInput for layers, pools and options that no kernel serves."""
        nbytes = _workspace_bytes(options)
        self._settings = _read_settings(context, options)
        super().__init__(context, options, kernels)
        self._groups = tuple(dict.fromkeys(layer.group for layer in self._layers.values()))
        self._planner = Planner(kernels, self._settings, workspace(context, nbytes))
        self._staging = Staging(context.device)

    def prepare_layer(self, layer: LayerSpec) -> FlashInferMLALayer:
        LatentRows.check(layer)
        if layer.tp_q_head_num > MOST_HEADS:
            raise InvalidInput(
                f"layer {layer.layer_id}: tp_q_head_num",
                got=layer.tp_q_head_num,
                expected=f"at most {MOST_HEADS} heads, the rows of a tile",
            )
        pool = self.context.token_to_kv_pool
        scale, _ = pool.read_scales(layer.k_scale, layer.v_scale)
        power = 2.0 ** math.floor(math.log2(scale))
        rows = pool.get_key_buffer(layer.layer_id).squeeze(1)
        pages = self.context.latent_pages(layer, self._settings.page_size)
        return FlashInferMLALayer(
            group=LatentGroup(
                num_heads=layer.tp_q_head_num,
                scaling=layer.scaling,
                pool_group=pool.group_of(layer.layer_id),
                layer_id=layer.layer_id,
            ),
            latents=_split(pages.squeeze(2)),
            words=rows.view(torch.int64) if self._settings.widens else None,
            power=power,
            rest=scale / power,
        )

    def plan_step(self, batch: ForwardBatch, buffers: GraphIndices | None) -> FlashInferMLAStep:
        """Plan every group of layers. A batch that was captured is recognised by its address."""
        step = FlashInferMLAStep(batch, self.context, self._settings.page_size)
        if buffers is None:
            # The latest first: a batch may have been captured again.
            buffers = next(
                (buffer for buffer in reversed(self._buffers) if buffer.has(batch)), None
            )
        elif batch.forward_mode not in CAPTURED:
            raise GraphUnsupported(
                f"a captured launch fixes how rows are tiled, which {batch.forward_mode.name} with "
                "its requests of many lengths does not: run it eagerly"
            )
        if not step.num_rows:
            return step
        self._staging.wait()
        if buffers is None:
            for group in self._groups:
                step.in_pool[group] = self._planner.plan(group, step, step.indices(group))
        else:
            step.in_pool = buffers.plan(self._planner, step)
        self._staging.mark()
        return step

    def fill_step(self, step: FlashInferMLAStep, batch: ForwardBatch) -> None:
        """Nothing is left to do: plans are made outside of graphs."""

    def make_buffers(self, max_bs: int, max_num_tokens: int) -> GraphIndices:
        """Raises GraphUnsupported for a pool of 8-bit floats: copies of all keys that a captured
        step might have would take more memory than the pool."""
        if self._settings.widens:
            raise GraphUnsupported(
                "flashinfer_mla widens 8-bit keys into memory of the step's size, which no graph "
                "has: run without graphs, take a KV dtype of 16 bits, or choose another backend"
            )
        return GraphIndices(self._groups, self.context, self._settings.page_size, max_bs)

    def attend(
        self,
        call: AttentionCall,
        layer: FlashInferMLALayer,
        step: FlashInferMLAStep,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        q, q_rope, out = call.q, call.rotary_queries(), call.out
        if not step.num_rows:
            return call.empty_result()
        scale = 1.0
        if call.save_kv_cache or call.k is None or batch.forward_mode.is_decode():
            planned = step.in_pool[layer.group]
            latents, scale = layer.read(planned.slots, q.dtype), layer.rest
        else:
            latents = _own_latents(call.k, call.k_rope, q.dtype)
            planned = self._planned_for_call(layer.group, step)
        if scale != 1:
            q, q_rope = q * scale, q_rope * scale
        if out is None or not Rows.is_aligned(out):
            out = q.new_empty((*q.shape[:2], LatentRows.LATENT_DIM))
        into = writable_lse(call.lse)
        if step.num_rows < q.shape[0]:
            out[step.num_rows :].zero_()
            if into is not None:
                into[step.num_rows :].fill_(-torch.inf)
        planned.attend(Rows.aligned(q), Rows.aligned(q_rope), latents, out, into)
        if into is not None and call.lse is not None and into is not call.lse:
            call.lse.copy_(into)
        return out if scale == 1 else out.mul_(scale)

    def _planned_for_call(self, group: LatentGroup, step: FlashInferMLAStep) -> Planned:
        """Planned now: most calls have their keys in the pool."""
        planned = step.in_call.get(group)
        if planned is None:
            planned = step.in_call[group] = self._planner.plan(group, step, None)
            self._staging.mark()
        return planned


def _split(pages: torch.Tensor) -> Latents:
    """Both parts of rows [pages, page_size, 576]."""
    return pages[..., : LatentRows.LATENT_DIM], pages[..., LatentRows.LATENT_DIM :]


def _own_latents(k: torch.Tensor, k_rope: torch.Tensor | None, dtype: torch.dtype) -> Latents:
    """The call's own keys as pages of one token.

    k: [T, 1, 512]. k_rope: [T, 1, 64].
    Raises InvalidInput if they are not of the dtype of Q.
    """
    if k_rope is None or k.dtype != dtype or k_rope.dtype != dtype:
        dtypes = f"{k.dtype} and {None if k_rope is None else k_rope.dtype}"
        raise InvalidInput("k", got=dtypes, expected=f"k and k_rope of {dtype}, as q is")
    return Rows.aligned(k), Rows.aligned(k_rope)


def _read_settings(context: BackendContext, options: Mapping[str, object]) -> Settings:
    request, pool = context.request, context.token_to_kv_pool
    dtype = torch_dtype(request.dtype) if request.dtype else None
    if dtype not in (torch.bfloat16, torch.float16):
        raise InvalidInput("request.dtype", got=request.dtype, expected="bfloat16 or float16")
    widens = pool.dtype == WIDENED
    if not widens and pool.dtype != dtype:
        raise InvalidInput(
            "token_to_kv_pool", got=pool.dtype, expected=f"{dtype}, as Q is, or {WIDENED}"
        )
    return Settings(
        dtype=dtype,
        widens=widens,
        page_size=1 if widens else pool.page_size,
        backend=str(options.get("backend", "auto")),
    )


def _workspace_bytes(options: Mapping[str, object]) -> int:
    nbytes = int(str(options.get("workspace_bytes", 0))) or WORKSPACE_BYTES
    if nbytes < LEAST_WORKSPACE_BYTES:
        raise InvalidInput(
            "flashinfer_mla.workspace_bytes",
            got=nbytes,
            expected=f"{LEAST_WORKSPACE_BYTES - nbytes} bytes more, {LEAST_WORKSPACE_BYTES}, or 0 "
            f"for {WORKSPACE_BYTES}",
        )
    return nbytes


make = KernelLibrary(
    address="nvidia/flashinfer_mla",
    backend=FlashInferMLABackend,
    providers={"flashinfer": lambda: from_flashinfer(import_module("flashinfer.mla"))},
    trial=rehearse,
    hint=HINT,
)
