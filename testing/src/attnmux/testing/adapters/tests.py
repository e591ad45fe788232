"""Tests of every adapter of a kernel library, in addition to the conformance suite.

`AdapterWorld` makes an adapter on emulated kernels with a prepared step; `recorded` notes what the
kernels are called with; `AdapterTests` are the tests that all adapters share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import pytest
import torch

from attnmux.core import (
    AttentionBackend,
    AttnmuxError,
    BackendContext,
    BackendFailed,
    ForwardMode,
    GraphUnsupported,
    InvalidInput,
    LayerSpec,
    Platform,
)
from attnmux.core.plugin import (
    BackendCard,
    CapturedGraph,
    GraphStep,
    KernelLibrary,
    OptionValue,
    rehearse,
)
from attnmux.testing import reference
from attnmux.testing.cases.case import Case, Step, decode, extend
from attnmux.testing.graphs.recording import RecordingGraphs
from attnmux.testing.run.candidate import Candidate
from attnmux.testing.run.runner import run_case
from attnmux.testing.setup.case import CaseSetup, make_setup
from attnmux.testing.setup.placement import buffers
from attnmux.testing.setup.prepared import PreparedStep, prepare_step

K = TypeVar("K")

LATENT: Mapping[str, Any] = MappingProxyType(
    {
        "kind": "mla",
        "num_q_heads": 16,
        "num_kv_heads": 1,
        "head_dim": 192,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
)
"""Fields of `Case` for layers of MLA."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCall:
    """One call of a library's function."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def recorded(kernels: K) -> tuple[K, list[KernelCall]]:
    """The kernels dataclass with every function wrapped, and the list that its calls go to.

    Of a class `name`, calls are `name`, and `name.plan` and `name.run` of its instances.
    """
    calls: list[KernelCall] = []

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the library's
            calls.append(KernelCall(name=name, args=args, kwargs=kwargs))
            return function(*args, **kwargs)

        return call

    def wrap_class(name: str, wrapper: type) -> Callable[..., Any]:
        def method(of: str) -> Callable[..., Any]:
            def call(self: object, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the library's
                calls.append(KernelCall(name=f"{name}.{of}", args=args, kwargs=kwargs))
                return getattr(wrapper, of)(self, *args, **kwargs)

            return call

        return wrap(name, type(name, (wrapper,), {of: method(of) for of in ("plan", "run")}))

    wrapped = {
        each.name: (wrap_class if isinstance(function, type) else wrap)(each.name, function)
        for each in fields(kernels)  # type: ignore[arg-type]  # a dataclass
        if callable(function := getattr(kernels, each.name))
    }
    return replace(kernels, **wrapped), calls  # type: ignore[type-var]  # a dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterWorld:
    """How to make one adapter and the world that it attends in."""

    library: KernelLibrary[Any, Any]
    kernels: Any
    """Emulated: an instance of the adapter's kernels dataclass."""
    platform: Platform
    host_lens: bool = False
    """Whether batches have host mirrors, for adapters that plan with them."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Case` that hold unless a test gives others."""

    def world(self, *steps: Step, **settings: Any) -> CaseSetup:  # noqa: ANN401  # fields of Case
        case = Case(name="adapter", steps=steps, **{**self.settings, **settings})
        return make_setup(case, self.platform, "cpu")

    def backend(
        self,
        context: BackendContext,
        options: Mapping[str, object] | None = None,
        kernels: Any = None,  # noqa: ANN401  # the adapter's
    ) -> Any:  # noqa: ANN401  # tests look into adapters
        """The adapter itself, without the trial of its library."""
        return self.library.backend(context, options or {}, kernels or self.kernels)

    def prepare(self, world: CaseSetup, step: Step) -> PreparedStep:
        """The step, with host mirrors where the adapter needs them."""
        return prepare_step(world, step, host_lens=self.host_lens)

    def prepared(
        self,
        step: Step,
        *,
        kernels: Any = None,  # noqa: ANN401  # the adapter's
        options: Mapping[str, object] | None = None,
        host_lens: bool = False,
        **settings: Any,  # noqa: ANN401  # fields of Case
    ) -> tuple[Any, PreparedStep]:
        """An adapter with the step's metadata made, and the step; by default K and V are in the
        pool."""
        world = self.world(step, **{"kv_in_pool": True, **settings})
        backend = self.backend(world.context, options, kernels)
        prepared = prepare_step(world, step, host_lens=host_lens or self.host_lens)
        backend.init_forward_metadata(prepared.batch)
        return backend, prepared

    def calls(
        self,
        *steps: Step,
        options: Mapping[str, object] | None = None,
        host_lens: bool = False,
        **settings: Any,  # noqa: ANN401  # fields of Case
    ) -> list[KernelCall]:
        """The calls that the adapter makes in the steps; by default they bring K and V."""
        kernels, calls = recorded(self.kernels)
        world = self.world(*steps, **settings)
        backend = self.backend(world.context, options, kernels)
        for step in steps:
            prepared = prepare_step(world, step, host_lens=host_lens or self.host_lens)
            backend.init_forward_metadata(prepared.batch)
            outputs(backend, prepared)
        return calls

    def rehearsed(
        self,
        *steps: Step,
        options: Mapping[str, object] | None = None,
        **settings: Any,  # noqa: ANN401  # fields of Case
    ) -> list[KernelCall]:
        """The calls of a trial for the steps' phases."""
        kernels, calls = recorded(self.kernels)
        rehearse(self.backend(self.world(*steps, **settings).context, options, kernels))
        return calls

    def captured(self, step: Step, **settings: Any) -> tuple[PreparedStep, list[KernelCall]]:  # noqa: ANN401  # fields of Case
        """The step, prepared as in a capture, and the calls of its layers; K and V are in the
        pool."""
        kernels, calls = recorded(self.kernels)
        backend, made = self.prepared(step, kernels=kernels, **settings)
        calls.clear()
        backend.init_cuda_graph_state(made.batch.batch_size, made.batch.num_tokens)
        backend.init_forward_metadata_out_graph(made.batch, in_capture=True)
        backend.init_forward_metadata_in_graph(made.batch)
        outputs(backend, made)
        return made, calls

    def refuses(
        self,
        reason: str,
        *steps: Step,
        layer: Mapping[str, Any] | None = None,
        batch: Mapping[str, Any] | None = None,
        options: Mapping[str, object] | None = None,
        **settings: Any,  # noqa: ANN401  # fields of Case
    ) -> None:
        """Assert that the adapter refuses the world, the first layer alone with fields of `layer`,
        or the first step with fields of `batch`, which is not prepared without them.

        reason: a pattern of the message, which begins with the argument's name.
        """
        world = self.world(*steps, **settings)
        context = world.context
        if layer is not None:
            context = replace(context, layers=(replace(context.layers[0], **layer),))
        if batch is None:
            with pytest.raises(InvalidInput, match=reason):
                self.backend(context, options)
            return
        backend, step = self.backend(context, options), self.prepare(world, steps[0])
        with pytest.raises(InvalidInput, match=reason):
            backend.init_forward_metadata(replace(step.batch, **batch))
        with pytest.raises(AttnmuxError, match=r"no step is prepared|init_forward_metadata"):
            outputs(backend, step)

    def captures_no(self, reason: str, step: Step, **settings: Any) -> None:  # noqa: ANN401  # fields of Case
        """Assert that the adapter refuses to capture the step; reason: a pattern."""
        world = self.world(step, **{"kv_in_pool": True, **settings})
        backend, batch = self.backend(world.context), self.prepare(world, step).batch
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        with pytest.raises(GraphUnsupported, match=reason):
            backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def fails(self, error: Exception, *names: str, step: Step, **settings: Any) -> BackendFailed:  # noqa: ANN401  # as above
        """The message of the library's trial if its functions of these names raise the error."""

        def failing(*_: object, **__: object) -> None:
            raise error

        broken = replace(self.kernels, **dict.fromkeys(names, failing))
        library = replace(self.library, providers={"broken": lambda: broken})
        with pytest.raises(BackendFailed) as failed:
            library(self.world(step, **settings).context, {})
        return failed.value

    def candidate(
        self, card: BackendCard, *, core_count: int | None = None, **options: OptionValue
    ) -> Candidate:
        """The adapter for the conformance suite; its card needs no library. core_count: processors
        of the device, unless the platform's."""
        platform = self.platform
        if core_count is not None:
            platform = replace(platform, core_count=core_count)
        return Candidate(
            card=replace(card, requires=()),
            platform=platform,
            options=options,
            device="cpu",
            factory=self.backend,
        )


def assert_passes(
    candidate: Candidate,
    *steps: Step,
    **settings: Any,  # noqa: ANN401  # fields of Case
) -> None:
    """Run the steps as a case of the conformance suite."""
    outcome = run_case(candidate, Case(name="adapter", steps=steps, **settings))
    assert outcome.status == "passed", outcome.message


def outputs(
    backend: AttentionBackend,
    step: PreparedStep,
    **more: Any,  # noqa: ANN401  # arguments of `forward`
) -> list[torch.Tensor]:
    """The result of each layer of a step, whose indexer writes its picks first."""
    results, picks = [], step.batch.topk_indices
    for given in step.inputs:
        if given.topk_indices is not None and picks is not None:
            picks.copy_(given.topk_indices)
        result = backend.forward(
            given.q,
            given.k,
            given.v,
            given.layer,
            step.batch,
            step.save_kv_cache,
            q_rope=given.q_rope,
            k_rope=given.k_rope,
            **more,
        )
        results.append(result)
    return results


def misaligned(rows: torch.Tensor) -> torch.Tensor:
    """The rows [T, H, D] at addresses where a load of 16 bytes faults."""
    width = rows[0].numel()
    return rows.new_empty(len(rows), width + 3)[:, 1 : width + 1].view(rows.shape).copy_(rows)


def check_graphs_side_by_side(
    adapter: AdapterWorld,
    small: Step,
    large: Step,
    **settings: Any,  # noqa: ANN401  # fields of Case
) -> None:
    """Capture the first layer of a small step, then that of a large one, which needs larger
    buffers. The first graph must give the same result as before."""
    world = adapter.world(small, large, **{"kv_in_pool": True, **settings})
    backend, context = adapter.backend(world.context), world.context
    kept = []  # graphs read a batch where it was captured

    def captured(step: Step) -> CapturedGraph:
        kept.append(made := adapter.prepare(world, step))
        batch, first = made.batch, replace(made, inputs=made.inputs[:1])
        backend.init_cuda_graph_state(batch.batch_size, batch.num_tokens)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        with torch.no_grad():
            return RecordingGraphs().capture(
                GraphStep(
                    prepare=lambda: backend.init_forward_metadata_in_graph(batch),
                    forward=lambda: outputs(backend, first)[0],
                )
            )

    graph = captured(small)
    graph.replay()
    expected = graph.outputs.clone()
    layer_id = context.layers[0].layer_id
    read = [*buffers(world, layer_id), context.req_to_token_pool.req_to_token]
    before = [tensor.clone() for tensor in read]
    captured(large).replay()
    for tensor, values in zip(read, before, strict=True):
        tensor.copy_(values)
    graph.outputs.zero_()
    graph.replay()
    assert torch.equal(graph.outputs, expected)


def check_layers_outside_the_pool(
    adapter: AdapterWorld,
    step: Step,
    **settings: Any,  # noqa: ANN401  # fields of Case
) -> None:
    """Layers that the pool does not store attend to K and V of the call, and cannot do without.

    step: an extend step without prefixes.
    """
    world = adapter.world(step, save_kv_cache=False, **settings)
    made = adapter.prepare(world, step)
    inputs = tuple(
        replace(given, layer=replace(given.layer, layer_id=given.layer.layer_id + 100))
        for given in made.inputs
    )
    backend = adapter.backend(replace(world.context, layers=tuple(each.layer for each in inputs)))
    backend.init_forward_metadata(made.batch)
    table, pool = world.context.req_to_token_pool.req_to_token, world.context.token_to_kv_pool
    found = outputs(backend, replace(made, inputs=inputs))
    for given, out in zip(made.inputs, found, strict=True):
        expected, _ = reference.attention(
            given.q,
            given.layer,
            made.batch,
            table,
            pool,
            k=given.k,
            v=given.v,
            q_rope=given.q_rope,
            k_rope=given.k_rope,
        )
        torch.testing.assert_close(out.double(), expected, atol=8e-3, rtol=1.6e-2)
    given = inputs[0]
    with pytest.raises(AttnmuxError, match=r"not in the KV pool.*save_kv_cache=False"):
        backend.forward(given.q, None, None, given.layer, made.batch, q_rope=given.q_rope)


class AdapterTests:
    """Tests that every adapter passes; a subclass sets `adapter` and, where needed, `step`."""

    adapter: ClassVar[AdapterWorld]
    step: ClassVar[Step] = decode(40, 7)
    """A step that the adapter serves in graphs."""

    def test_forward_needs_a_prepared_step(self) -> None:
        world = self.adapter.world(self.step, kv_in_pool=True)
        backend = self.adapter.backend(world.context)
        with pytest.raises(AttnmuxError, match="init_forward_metadata"):
            outputs(backend, self.adapter.prepare(world, self.step))

    def test_metadata_is_made_once_a_step(self) -> None:
        backend, prepared = self.adapter.prepared(self.step)
        before = outputs(backend, prepared)
        backend.context.req_to_token_pool.req_to_token.zero_()
        torch.testing.assert_close(outputs(backend, prepared), before, rtol=0, atol=0)

    def test_an_idle_step_prepares_nothing(self) -> None:
        backend, prepared = self.adapter.prepared(self.step)
        idle = replace(prepared.batch, forward_mode=ForwardMode.IDLE)
        backend.init_forward_metadata(idle)
        with pytest.raises(AttnmuxError, match="init_forward_metadata"):
            outputs(backend, prepared)

    @pytest.mark.parametrize("max_batch_size", [0, 1])
    def test_a_capture_without_room_is_refused(self, max_batch_size: int) -> None:
        world = self.adapter.world(self.step)
        backend = self.adapter.backend(world.context)
        if max_batch_size:
            backend.init_cuda_graph_state(max_batch_size, max_batch_size)
        batch = self.adapter.prepare(world, self.step).batch
        with pytest.raises(GraphUnsupported, match="init_cuda_graph_state"):
            backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def test_a_step_without_requests(self) -> None:
        backend, prepared = self.adapter.prepared(replace(self.step, lens=(), new=()))
        for given, out in zip(prepared.inputs, outputs(backend, prepared), strict=True):
            assert out.shape == (0, given.layer.tp_q_head_num, given.layer.v_head_dim)

    def test_rows_that_kernels_cannot_load_or_store(self) -> None:
        backend, prepared = self.adapter.prepared(self.step)
        given = prepared.inputs[0]
        (expected, *_) = outputs(backend, prepared)
        out = misaligned(torch.full_like(expected, 7))
        q_rope = None if given.q_rope is None else misaligned(given.q_rope)
        odd = replace(prepared, inputs=(replace(given, q=misaligned(given.q), q_rope=q_rope),))
        assert outputs(backend, odd, out=out)[0] is out
        assert torch.equal(out, expected)

    def test_an_lse_is_written_or_refused_before_the_pool_is(self) -> None:
        backend, prepared = self.adapter.prepared(self.step, kv_in_pool=False)
        given, pool = prepared.inputs[0], backend.context.token_to_kv_pool
        lse = torch.full(given.q.shape[:2], torch.nan)
        held = [each.clone() for each in pool.get_kv_buffer(given.layer.layer_id)]
        first = replace(prepared, inputs=(given,))
        try:
            outputs(backend, first, lse=lse)
        except InvalidInput as refused:
            if refused.argument != "lse":
                raise
            after = pool.get_kv_buffer(given.layer.layer_id)
            pairs = zip(held, after, strict=True)
            assert all(torch.equal(*(e.view(torch.uint8) for e in pair)) for pair in pairs)
        else:
            assert not lse.isnan().any()

    def test_a_library_that_does_not_run_is_a_reason(self) -> None:
        kernels = self.adapter.kernels
        names = [each.name for each in fields(kernels) if callable(getattr(kernels, each.name))]
        error = RuntimeError("no kernel image is available for this device\nand much more")
        said = str(self.adapter.fails(error, *names, step=self.step))
        assert "no kernel image is available for this device" in said
        assert "much more" not in said

    def test_a_library_that_runs_is_taken(self) -> None:
        library = replace(self.adapter.library, providers={"ours": lambda: self.adapter.kernels})
        backend = library(self.adapter.world(self.step).context, {})
        assert isinstance(backend, AttentionBackend)


class LatentTests(AdapterTests):
    """Tests of adapters over latents that leave expanded layers to another backend."""

    def test_layers_of_the_expanded_prefill_are_left_to_others(self) -> None:
        world = self.adapter.world(self.step, kv_in_pool=True)
        heads = world.context.layers[0].tp_q_head_num
        expanded = LayerSpec(
            layer_id=100,
            tp_q_head_num=heads,
            tp_k_head_num=heads,
            tp_v_head_num=heads,
            qk_head_dim=192,
            v_head_dim=128,
            scaling=1.0,
        )
        context = replace(world.context, layers=(expanded, *world.context.layers))
        backend, prepared = self.adapter.backend(context), self.adapter.prepare(world, self.step)
        rehearse(backend)
        backend.init_forward_metadata(prepared.batch)
        assert all(out.isfinite().all() for out in outputs(backend, prepared))
        q = torch.zeros(prepared.batch.num_tokens, heads, 192, dtype=torch.bfloat16)
        with pytest.raises(InvalidInput, match=r"serves: \[1, 3\], got mha, id 100"):
            backend.forward(q, None, None, expanded, prepared.batch)

    @pytest.mark.parametrize(
        ("settings", "argument"),
        [
            ({"kv_lora_rank": 256}, "layer 1"),
            ({"qk_rope_head_dim": 32}, "layer 1"),
            ({"logit_cap": 2.0}, "layer 1"),
            ({"windows": (8, None)}, "layer 1"),
            ({"attention_chunk": 16}, "layer 1"),
            ({"sinks": True}, "layer 1"),
            ({"kind": "mha", "kv_lora_rank": None, "qk_rope_head_dim": None}, "layers"),
        ],
    )
    def test_layers_that_are_refused(self, settings: dict[str, Any], argument: str) -> None:
        world = self.adapter.world(decode(3), **settings)
        with pytest.raises(InvalidInput) as refusal:
            self.adapter.backend(world.context)
        assert refusal.value.argument == argument


class LatentDecodeTests(LatentTests):
    """Tests of adapters that leave prefill to another backend."""

    @pytest.mark.parametrize(
        "step", [extend((0, 3)), extend((0, 3), (4, 1), mode=ForwardMode.MIXED)]
    )
    def test_prefill_is_refused(self, step: Step) -> None:
        world = self.adapter.world(step, spec_topk=1, kv_in_pool=True)
        backend, prepared = self.adapter.backend(world.context), prepare_step(world, step)
        with pytest.raises(InvalidInput, match="forward_mode: expected DECODE"):
            backend.init_forward_metadata(prepared.batch)
        with pytest.raises(AttnmuxError, match="no step is prepared"):
            outputs(backend, prepared)


class EagerAdapterTests(AdapterTests):
    """The same, of an adapter that captures no step: `step` is one that it serves eagerly."""

    no_graphs: ClassVar[str]
    """A pattern of the reason."""

    @pytest.mark.parametrize("max_batch_size", [0, 1])
    def test_a_capture_without_room_is_refused(self, max_batch_size: int) -> None:
        """No step is captured."""
        backend, made = self.adapter.prepared(self.step)
        if max_batch_size:
            with pytest.raises(GraphUnsupported, match=self.no_graphs):
                backend.init_cuda_graph_state(max_batch_size, max_batch_size)
        with pytest.raises(GraphUnsupported):
            backend.init_forward_metadata_out_graph(made.batch, in_capture=True)
