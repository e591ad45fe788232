"""Compiles a model's layers with torch.compile: the code of one layer serves all that are alike.

Attention stays one opaque op, so that any backend serves compiled layers, eagerly and in device
graphs. Embeddings, the last norm and the output head run as they are.
"""

from __future__ import annotations

import itertools

import torch

from attnmux.core import InvalidInput
from attnmux.transformers.model.hidden_states import decoder_layers
from attnmux.transformers.model.layer_call import mark_layer
from attnmux.transformers.model.packed_decoder import PackedDecoder
from attnmux.transformers.model.repeated import has_numbered_calls
from attnmux.transformers.requests.sequence import SequenceState
from attnmux.transformers.run.linears import KernelLinear, is_plain, multiply_by, product_ops
from attnmux.transformers.run.memory import ServedModel
from attnmux.transformers.run.model_on_backend import ModelOnBackend
from attnmux.transformers.run.product_pass import ProductPass

TRIAL_TOKENS = 19
"""Prompt tokens of the steps that compile a model."""

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of projections that Hugging Face's models apply to one input."""


class MergedLinear(torch.nn.Module):
    """The columns from `start` to `stop` of a product that other projections share."""

    def __init__(self, original: torch.nn.Linear, whole: torch.nn.Linear, start: int) -> None:
        """whole: the product of all of them."""
        super().__init__()
        self.original, self.whole = original, whole
        self.start, self.stop = start, start + original.out_features

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        every: torch.Tensor = self.whole(rows)
        return every[..., self.start : self.stop]


def merge(layer: torch.nn.Module) -> None:
    """Merge the projections of a layer if they are plain linear maps. Takes no memory: the
    original weights become parts of the merged ones."""
    for module in [*layer.modules()]:
        for names in TOGETHER:
            members = [getattr(module, name, None) for name in names]
            linears = [linear for linear in members if is_plain(linear)]
            if len(linears) == len(names) and _alike(linears):
                _merge(module, dict(zip(names, linears, strict=True)))


def split(layer: torch.nn.Module) -> None:
    """Undo `merge`."""
    for module in [*layer.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, MergedLinear):
                setattr(module, name, child.original)


def _alike(linears: list[torch.nn.Linear]) -> bool:
    kinds = {
        (linear.in_features, linear.weight.dtype, linear.weight.device, linear.bias is None)
        for linear in linears
    }
    hooked = any(linear._forward_hooks or linear._forward_pre_hooks for linear in linears)
    return len(kinds) == 1 and not hooked


def _merge(module: torch.nn.Module, linears: dict[str, torch.nn.Linear]) -> None:
    whole = _whole([*linears.values()])
    starts = [0, *itertools.accumulate(each.out_features for each in linears.values())]
    for start, (name, linear) in zip(starts, linears.items(), strict=False):
        setattr(module, name, MergedLinear(linear, whole, start))


def _whole(linears: list[torch.nn.Linear]) -> torch.nn.Linear:
    """One linear layer for all, by the kernel that the first one calls."""
    first = linears[0]
    size = sum(linear.out_features for linear in linears)
    biased = first.bias is not None
    whole = torch.nn.Linear(first.in_features, size, bias=biased, device="meta")
    whole.weight = _joined([linear.weight for linear in linears])
    if biased:
        whole.bias = _joined([linear.bias for linear in linears])
    if isinstance(first, KernelLinear):
        multiply_by(first.kernel, whole)
    return whole


def _joined(parts: list[torch.Tensor]) -> torch.nn.Parameter:
    """The rows of all parts; each part becomes a view of them.

    Parts that were joined before stay where they are, since device graphs may read them.
    """
    ends = [*itertools.accumulate(map(len, parts))]
    if _joins(parts):
        first = parts[0].data
        whole = first.as_strided((ends[-1], *first.shape[1:]), first.stride())
    else:
        whole = torch.cat([part.data for part in parts])
        for part, end in zip(parts, ends, strict=True):
            part.data = whole[end - len(part) : end]
    return torch.nn.Parameter(whole, requires_grad=False)


def _joins(parts: list[torch.Tensor]) -> bool:
    """Whether each part begins where the one before it ends, in the same memory."""
    return all(
        part.is_contiguous()
        and part.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and part.data_ptr() + part.nbytes == after.data_ptr()
        for part, after in itertools.pairwise(parts)
    )


def compile_layers(model: torch.nn.Module, backend: str = "inductor") -> int:
    """Have each decoder layer compiled when it is next called. Returns the number of layers.

    backend: as `torch.compile` takes it.
    """
    layers = list(decoder_layers(model))
    options = None
    if backend == "inductor":
        options = {"post_grad_custom_pre_pass": ProductPass(product_ops(model))}
    for layer, attention, layer_id in layers:
        mark_layer(attention, layer_id)
        merge(layer)
        # Steps have any number of tokens.
        layer.compile(dynamic=True, backend=backend, options=options)
    return len(layers)


def undo(model: torch.nn.Module) -> None:
    """Run the layers as before `compile_layers`."""
    for layer, _, _ in decoder_layers(model):
        layer._compiled_call_impl = None
        split(layer)


def compile_model(runner: ModelOnBackend, backend: str) -> None:
    """See `ModelRunner.compile`."""
    check_compiles(runner.served)
    if not compile_layers(runner.model, backend):
        raise no_layers(runner.served)
    runner.is_compiled = True
    try:
        try_steps(runner)
    except BaseException:
        undo(runner.model)
        runner.is_compiled = False
        raise


def check_compiles(model: ServedModel) -> None:
    """Raise InvalidInput for a model whose layers cannot be compiled unchanged."""
    for part in model.parts:
        if part.uncompiled is not None:
            got, expected = part.uncompiled
            raise InvalidInput("compile", got=got, expected=expected)
    if has_numbered_calls(model.module):
        expected = "attention once in each layer: its code serves all that are alike"
        raise InvalidInput("compile", got="layers that attend again", expected=expected)
    if isinstance(model.module, PackedDecoder):
        raise no_layers(model)


def no_layers(model: ServedModel) -> InvalidInput:
    """The error of a model without a list of layers."""
    got = type(model.module).__name__
    return InvalidInput("compile", got=got, expected="a model with a list of layers")


def try_steps(runner: ModelOnBackend) -> None:
    """Run a prompt, then one decode step of two requests and one of one. A compiler makes other
    code for a single token than for more."""
    states: list[SequenceState] = []
    try:
        for _ in range(min(2, runner.context.max_batch_size)):
            prompt_len = max(min(TRIAL_TOKENS, runner.context.max_context_len - 2), 1)
            states.append(SequenceState(token_ids=[0] * prompt_len))
            runner.extend(states[-1:])
            states[-1].token_ids.append(0)
        runner.decode(states)
        for state in states:
            state.token_ids.append(0)
        runner.decode(states[:1])
    finally:
        runner.release(states)
