"""A model on its backend: pools, steps and logits."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from attnmux.core import (
    AttentionBackend,
    BackendContext,
    CapturingRanks,
    Decision,
    DeviceGraphs,
    ForwardBatch,
    ForwardMode,
    GraphConfig,
    GraphRunner,
    InvalidInput,
    KeyPicker,
    LayerSpec,
    LinearLayerSpec,
    ModelInput,
    ReqToTokenPool,
    TunedLaunch,
    Workspace,
    device_graphs,
    forward_context,
    graph_batch_sizes,
    torch_dtype,
)
from attnmux.transformers.batching import StepBuilder
from attnmux.transformers.encoder_decoder import PackedDecoder
from attnmux.transformers.engine.stats import Laps
from attnmux.transformers.images.capture import ImageReader
from attnmux.transformers.images.prompt import PromptImages
from attnmux.transformers.indexers import Indexers
from attnmux.transformers.pools import (
    MemoryBudget,
    bytes_per_token,
    make_pools,
    make_states,
    pool_sizes,
)
from attnmux.transformers.ranks import ONE_RANK, Ranks
from attnmux.transformers.repeated import has_numbered_calls
from attnmux.transformers.rotary import fixed_row_len
from attnmux.transformers.sequence import SequenceState, Step, check_encoder_len
from attnmux.transformers.tokenization import check_prompt

TRIAL_TOKENS = 19
"""Prompt tokens of the steps that compile a model."""


class ModelRunner:
    """Runs steps of a model on the decided backend.

    It keeps no requests: a caller extends, decodes and releases its `SequenceState`s. One step is
    in flight at a time.
    """

    def __init__(
        self,
        model: PreTrainedModel | PackedDecoder,
        layers: Sequence[LayerSpec],
        decision: Decision,
        *,
        linear: Sequence[LinearLayerSpec] = (),
        max_batch_size: int,
        max_context_len: int,
        max_total_tokens: int | None = None,
        memory: MemoryBudget | None = None,
        spare_pages: int = 0,
        max_encoder_len: int = 0,
        window_step_tokens: int | None = None,
        launches: tuple[TunedLaunch, ...] = (),
        debug: bool = False,
        wrap: Callable[[AttentionBackend, Decision], AttentionBackend] | None = None,
        ranks: Ranks = ONE_RANK,
        indexers: Indexers | None = None,
        images: ImageReader | None = None,
    ) -> None:
        """Allocate the pools and build the backend.

        model: loaded with attn_implementation="attnmux", on the decision's device; an
        encoder-decoder model as a `PackedDecoder`. layers: from `record_layers` or
        `record_decoder`. linear: the layers of the model's mixers. max_total_tokens: tokens of all
        requests together; they fit even if the last page of each request is partly filled. memory:
        the memory of the KV pool and the linear states. If both are given, the smaller one counts.
        spare_pages: as in `RunnerOptions`.
        max_encoder_len: encoder tokens of a request, in addition to its `max_context_len`; 0 for a
        decoder-only model. window_step_tokens: the prompt tokens of a step, at least, for which a
        window pool has room (see `pool_sizes`); None puts all layers into one pool. Callers then
        `slide` requests before each step, as the engine does.
        launches: as `BackendContext.launches`. wrap, ranks: as in `RunnerOptions`. indexers: those
        of the model, bound, where the decision is of kind "nsa".
        images: reads the images of prompts, on a backend of its own; None for text alone.
        Raises InvalidInput without either, PoolExhausted when the memory does not suffice.
        """
        self.model = model
        self.decision = decision
        self.ranks = ranks
        self.indexers = indexers
        device = model.device
        page_size = decision.page_size
        self.linear_states = make_states(linear, decision, max_batch_size, device)
        stored = ranks.stored(layers)
        most = None
        if max_total_tokens is not None:
            # With tokens interleaved over ranks, each page of these may be filled in part
            part_filled = max_batch_size if page_size > 1 or ranks.tokens_each(2) < 2 else 0
            tokens = ranks.tokens_each(max_total_tokens)
            most = (tokens // page_size + part_filled + spare_pages) * page_size
        elif memory is None:
            raise InvalidInput("memory", got=None, expected="max_total_tokens, memory or both")
        self.sizes = pool_sizes(
            stored,
            decision,
            max_tokens=most,
            nbytes=self._kv_bytes(memory, stored),
            max_batch_size=max_batch_size,
            window_step_tokens=None if max_encoder_len else window_step_tokens,
        )
        own, allocator, window_tree = make_pools(stored, decision, self.sizes, device=device)
        pool, allocator = ranks.shared_pool(own, allocator)
        self.kv_tokens = allocator.size * ranks.num_parts
        """Tokens that the KV memory of all ranks holds."""
        columns = max_encoder_len + max_context_len
        table = ReqToTokenPool(max_batch_size, columns, device)
        if indexers is not None:
            keys = indexers.pool(num_slots=pool.num_slots, dtype=self._index_dtype, device=device)
            indexers.picker = KeyPicker(
                pool=keys, req_to_token=table.req_to_token, topk=indexers.topk
            )
        self.context = BackendContext(
            request=decision.request,
            platform=decision.platform,
            device=device,
            layers=tuple(layers),
            req_to_token_pool=table,
            token_to_kv_pool=pool,
            linear_states=self.linear_states,
            workspace=Workspace(device),
            max_batch_size=max_batch_size,
            max_context_len=columns,
            launches=launches,
            debug=debug,
        )
        self.backend = self.build(self.context)
        if wrap is not None:
            self.backend = wrap(self.backend, decision)
        self.steps = StepBuilder(
            table,
            allocator,
            token_to_kv_pool=pool,
            window_tree=window_tree,
            max_step_tokens=fixed_row_len(model.config),
            max_encoder_len=max_encoder_len,
            has_linear_states=self.linear_states is not None,
        )
        self.graphs: GraphRunner | None = None
        """Of decode steps."""
        self.verify_graphs: GraphRunner | None = None
        """Of steps that verify drafts."""
        self.catch_up_graphs: GraphRunner | None = None
        """Of the steps in which a draft model reads what was accepted."""
        self.is_compiled = False
        """Whether the model's layers run as compiled code."""
        self.images = images
        if images is not None:
            images.tower.build(decision, device)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    def build(self, context: BackendContext) -> AttentionBackend:
        """The decided backend once more, over another request table of the same pools."""
        return self.ranks.build(self.decision, context)

    @property
    def _index_dtype(self) -> torch.dtype:
        """Of an indexer's keys: as coarse as the KV cache, where that is e4m3."""
        kv_dtype = torch_dtype(self.decision.kv_dtype)
        own = torch_dtype(self.decision.request.dtype or self.decision.kv_dtype)
        return kv_dtype if kv_dtype == torch.float8_e4m3fn else own

    def _kv_bytes(self, memory: MemoryBudget | None, layers: Sequence[LayerSpec]) -> int | None:
        """What the budget leaves to the KV pool. A share is one of the memory after the states."""
        if memory is None:
            return None
        states = (
            0 if self.linear_states is None or memory.nbytes is None else self.linear_states.nbytes
        )
        left = max(memory.resolve(self.model.device) - states, 0)
        if self.indexers is not None:
            ours = bytes_per_token(layers, self.decision)
            left = left * ours // (ours + self.indexers.bytes_per_token(self._index_dtype))
        return self.ranks.smallest(left)

    def compile(self, backend: str = "inductor") -> None:
        """Compile the model's layers, and run a few steps so that their code is made now.

        Call it before `capture_graphs`: graphs then hold the compiled code. Earlier graphs are
        dropped, since weights move. backend: as `torch.compile` takes it.
        Raises InvalidInput for an encoder-decoder model and one without a list of layers, and
        whatever the compiler raises; the layers then run as before.
        """
        self.graphs = self.verify_graphs = self.catch_up_graphs = None
        # By name: the import loads a compiler, which takes seconds.
        compiled = pkgutil.resolve_name("attnmux.transformers.compiled")
        if self.linear_states is not None:
            expected = "attention in every layer: a compiler would cut the model at each other one"
            raise InvalidInput("compile", got="a model with linear layers", expected=expected)
        if self.indexers is not None:
            expected = "a model without indexers, which read the running step"
            raise InvalidInput("compile", got="sparse attention", expected=expected)
        if has_numbered_calls(self.model):
            expected = "attention once in each layer: its code serves all that are alike"
            raise InvalidInput("compile", got="layers that attend again", expected=expected)
        if isinstance(self.model, PackedDecoder) or not compiled.compile_layers(
            self.model, backend
        ):
            raise InvalidInput(
                "compile", got=type(self.model).__name__, expected="a model with a list of layers"
            )
        self.is_compiled = True
        try:
            self._try_steps()
        except BaseException:
            compiled.undo(self.model)
            self.is_compiled = False
            raise

    def _try_steps(self) -> None:
        """Run a prompt, then one decode step of two requests and one of one. A compiler makes other
        code for a single token than for more."""
        states: list[SequenceState] = []
        try:
            for _ in range(min(2, self.context.max_batch_size)):
                prompt_len = max(min(TRIAL_TOKENS, self.context.max_context_len - 2), 1)
                states.append(SequenceState(token_ids=[0] * prompt_len))
                self.extend(states[-1:])
                states[-1].token_ids.append(0)
            self.decode(states)
            for state in states:
                state.token_ids.append(0)
            self.decode(states[:1])
        finally:
            self.release(states)

    def capture_graphs(
        self,
        *,
        batch_sizes: Sequence[int] | None = None,
        draft_tokens: int | None = None,
        draft_topk: int = 1,
        devices: DeviceGraphs | None = None,
    ) -> None:
        """Capture decode steps, and with drafts those that verify them. Later steps replay them.

        batch_sizes: None takes the usual ones of each. draft_tokens, draft_topk: as in
        `RunnerOptions`. devices: None takes those of the model's device.
        Raises GraphUnsupported if the device or the backend has no graphs, or if the model does
        something that a graph cannot hold. Steps without graphs stay eager; if only the steps that
        verify cannot be captured, decode steps have theirs.
        """
        context = self.context
        devices = devices or device_graphs(context.device)
        topk = 0 if self.indexers is None else self.indexers.topk
        config = partial(GraphConfig, host_lens=True, index_topk=topk)
        sizes = partial(graph_batch_sizes, pool_size=context.max_batch_size, chosen=batch_sizes)
        encoder = self.steps.max_encoder_len > 0
        self.graphs = self._captured(config(batch_sizes=sizes(), encoder=encoder), devices)
        if draft_tokens is not None:
            verifying = config(
                batch_sizes=sizes(speculation=True),
                forward_mode=ForwardMode.TARGET_VERIFY,
                tokens_per_request=draft_tokens,
                spec_topk=draft_topk,
                visible=draft_topk > 1,
            )
            self.verify_graphs = self._captured(verifying, devices)

    def capture_catch_up(
        self, num_tokens: int, *, batch_sizes: Sequence[int], devices: DeviceGraphs
    ) -> None:
        """Capture DRAFT_EXTEND steps with `num_tokens` new tokens for each request.

        batch_sizes: ascending. Raises as `capture_graphs` does.
        """
        self.catch_up_graphs = None
        config = GraphConfig(
            batch_sizes=tuple(batch_sizes),
            forward_mode=ForwardMode.DRAFT_EXTEND,
            tokens_per_request=num_tokens,
            host_lens=True,
        )
        self.catch_up_graphs = self._captured(config, devices)

    def _captured(self, config: GraphConfig, devices: DeviceGraphs) -> GraphRunner:
        inputs = {"input_ids": ModelInput(dtype=torch.int64)}
        if self.images is not None:
            inputs["position_ids"] = ModelInput(dtype=torch.int64)

        def make(ranks: CapturingRanks) -> GraphRunner:
            return GraphRunner(
                self.backend, self.logits, config, devices=devices, inputs=inputs, ranks=ranks
            )

        return self.ranks.capture(make)

    def encode(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """`SequenceState.encoder_states` of a request: see `PackedDecoder.encode`.

        Raises InvalidInput for a decoder-only model, and for more tokens than fit.
        """
        if not isinstance(self.model, PackedDecoder):
            raise InvalidInput(
                "encoder", got="inputs for an encoder", expected="none: the model has none"
            )
        if "input_ids" in inputs:
            ids = inputs["input_ids"].flatten().tolist()
            longest = self.steps.max_encoder_len
            check_prompt("encoder input_ids", ids, int(self.model.config.vocab_size), longest)
        states = self.model.encode(inputs)
        check_encoder_len(states.shape[0], self.steps.max_encoder_len)
        return states

    def read_images(self, inputs: Mapping[str, Any]) -> PromptImages:
        """The images of one prompt, for `Engine.add`: see `ImageReader.read`.

        inputs: what the model's processor returns for a text and its images, in torch tensors.
        Raises InvalidInput for a runner that was not made for images, and as `ImageReader.read`.
        """
        if self.images is None:
            expected = "none: the runner was made without images=True"
            raise InvalidInput("images", got="some", expected=expected)
        return self.images.read(inputs)

    def extend(
        self, states: Sequence[SequenceState], num_new: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run the next pending tokens of each request; see `StepBuilder.extend`.

        Returns the logits after each request's last new token, [B, vocabulary]. If the model
        raises, the requests hold slots without K and V: release them with `zero`.
        """
        self.steps.slide(states)
        step = self.steps.extend(states, num_new)
        return self.forward(step, step.last_indices)

    def decode(self, states: Sequence[SequenceState]) -> torch.Tensor:
        """Run the one pending token of each request. Returns its logits, [B, vocabulary]."""
        self.steps.slide(states)
        step = self.steps.decode(states)
        return self.forward(step, step.last_indices)

    def release(self, states: Sequence[SequenceState], *, zero: bool = False) -> None:
        """Free everything that the requests hold; `zero` as in `StepBuilder.release`."""
        self.steps.release(states, zero=zero)

    def reset(self) -> None:
        """Free all rows and pages, as `StepBuilder.reset` does."""
        self.steps.reset()

    @property
    def vocabulary_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    # Not inference mode: captures cannot have its tensors, and compiled code would be made twice.
    @torch.inference_mode(False)
    @torch.no_grad()
    def forward(self, step: Step, indices: torch.Tensor, laps: Laps | None = None) -> torch.Tensor:
        """Run a step. Returns the logits after the tokens at `indices`, [len(indices), vocabulary].

        indices: [n] int64 among the step's T tokens. The next step may overwrite the result, as
        the replay of a graph does. laps: counts the time as "metadata" and "launch"; that of a
        replayed graph is all "launch".
        """
        return self.ranks.run(step, indices, partial(self._forward, laps=laps or Laps()))

    def _forward(self, step: Step, indices: torch.Tensor, laps: Laps) -> torch.Tensor:
        batch, inputs = step.batch, {"input_ids": step.input_ids}
        if step.encoder_states is not None:
            inputs["encoder_states"] = step.encoder_states
        if self.images is not None:
            inputs.update(self._image_inputs(step))
        mode = batch.forward_mode
        graphs = self.verify_graphs if mode.is_target_verify() else self.graphs
        graphs = self.catch_up_graphs if mode.is_draft_extend() else graphs
        size = self.ranks.graph_size(batch, graphs)
        if graphs is None or size is None:
            return self._run(step, inputs, indices, laps)
        logits = cast("torch.Tensor", graphs.replay(batch, inputs, size=size))
        laps.lap("launch")
        every = not mode.is_draft_extend() and indices is step.last_indices
        return logits if every else logits[indices]

    def _image_inputs(self, step: Step) -> dict[str, torch.Tensor]:
        """What the model takes besides or instead of the tokens' ids and places."""
        positions = step.batch.positions if step.position_ids is None else step.position_ids
        inputs = {"position_ids": positions}
        if step.images is not None:
            # Some models have no embedding of a placeholder
            ids = step.input_ids.index_fill(0, step.images.indices, 0)
            model: Any = self.model
            embeds: torch.Tensor = model.get_input_embeddings()(ids)
            rows = step.images.embeds.to(embeds.dtype)
            inputs["inputs_embeds"] = embeds.index_copy(0, step.images.indices, rows)
        return inputs

    @torch.inference_mode(False)
    @torch.no_grad()
    def idle(self) -> bool:
        """Run a step without requests, for other ranks that have some. Returns False if no rank
        has any."""
        return self.ranks.idle(self.graphs, self._run_padding)

    def _run_padding(self) -> None:
        seq_len = self.backend.select(ForwardMode.DECODE).get_cuda_graph_seq_len_fill_value()
        step = Step.padding(seq_len, self.context.device)
        self._run(step, {"input_ids": step.input_ids}, step.last_indices, Laps())

    def _run(
        self, step: Step, inputs: Mapping[str, torch.Tensor], indices: torch.Tensor, laps: Laps
    ) -> torch.Tensor:
        """Run a step eagerly."""
        batch, mode = step.batch, step.batch.forward_mode
        eagerly: AbstractContextManager[None] = nullcontext()
        if self.indexers is not None and self.indexers.picker is not None:
            batch = replace(batch, topk_indices=self.indexers.picker.room(batch))
            eagerly = self.indexers.eagerly()
        self.backend.init_forward_metadata(batch)
        laps.lap("metadata")
        every = (mode.is_target_verify() or mode.is_decode()) and indices is step.last_indices
        with forward_context(self.backend, batch), eagerly:
            logits = self.logits(batch, inputs, None if every else indices)
        laps.lap("launch")
        return logits

    def logits(
        self,
        batch: ForwardBatch,
        inputs: Mapping[str, torch.Tensor],
        keep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Call the model on a prepared step, inside its `forward_context`.

        keep: [n] int64, the tokens whose logits [n, vocabulary] are returned; None for all T.
        """
        keeps = {"logits_to_keep": keep} if keep is not None and self._keeps_logits else {}
        given = dict(inputs)
        positions = given.pop("position_ids", batch.positions)
        # A compiler makes other code for tensors that begin elsewhere in their memory.
        positions = positions.clone() if self.is_compiled else positions
        tokens = "input_ids"
        if "inputs_embeds" in given:
            tokens = "inputs_embeds"
            del given["input_ids"]
        given[tokens] = given[tokens].unsqueeze(0)
        logits = self.model(
            position_ids=positions.unsqueeze(-2),
            use_cache=False,
            **given,
            **keeps,
        ).logits[0]
        if keep is not None and not keeps:
            logits = logits[keep]
        assert isinstance(logits, torch.Tensor)
        return logits
