"""Splits a model's weights over ranks, as its `tp_plan` says (tensor parallelism).

transformers' plan names modules and parameters by patterns, and a style for each. This module cuts
the weights and sums the partial results. It uses plain tensors, since the wrapped ones of
transformers cost time on the host in each layer, and no plan keeps KV heads that are fewer than
ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from attnmux.core import InvalidInput
from attnmux.distributed import RankGroup
from attnmux.transformers.model.images.encoder import tower_of

WHOLE = frozenset(
    {
        "embedding_colwise",
        "embedding_rowwise",
        "keep_full_weight",
        "local_params",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "replicate",
        "replicated_with_grad_allreduce",
    }
)
"""Styles of weights that each rank keeps whole: they matter for training, or save memory alone."""

LATENT = {
    "q_proj": "colwise",
    "q_b_proj": "colwise",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
}
"""For latent attention that a plan leaves out, as that of DeepSeek-V3 does."""

KV = {"k_proj": ("head_dim",), "v_proj": ("v_head_dim", "head_dim")}
"""Projections of K and V, and the attributes of their owner that may state the dims of a head."""

EXPERTS = "moe_tp_experts"
"""The style of a module with the weights of all experts."""


class Joints:
    """Where ranks with the same tokens meet: they sum their parts of a layer's results."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group

    def chosen(
        self, model: PreTrainedModel, names: Sequence[tuple[str, str]]
    ) -> Sequence[tuple[str, str]]:
        """Pairs (name, style) of the plan whose weights are split."""
        return names

    def before(self, module: torch.nn.Module) -> None:
        """Add hooks to a layer whose outputs are split, and to experts."""

    def after(self, module: torch.nn.Module) -> None:
        """Add hooks to a layer whose inputs are split, and to experts: each rank has a part of the
        sum."""
        module.register_forward_hook(_Sum(self.group))


def split_model(model: PreTrainedModel, joints: Joints) -> None:
    """Keep this rank's part of the weights, and have the ranks meet at the joints.

    Heads are split in order. If there are fewer KV heads than ranks, ranks in succession hold
    the same one; each layer counts its own. Each rank keeps a vision tower whole. Raises
    InvalidInput for a model without a plan, a style that is not known, and heads or dims that the
    ranks do not divide. Then the model is of no use.
    """
    for name, style in joints.chosen(model, _matches(model, plan_of(model))):
        parent, _, last = name.rpartition(".")
        owner = model.get_submodule(parent)
        target = getattr(owner, last)
        if isinstance(target, torch.nn.Parameter):
            setattr(owner, last, _part(target, style, joints.group, name))
        else:
            _split_module(target, style, joints, name, head_dim=_head_dim(owner, last))


def heads_are_split(config: PreTrainedConfig) -> bool:
    """Whether each rank has a part of the query heads. Some plans keep all of them on each, if
    the projections of Q, K and V are one."""
    text = config.get_text_config(decoder=True)
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if getattr(text, "kv_lora_rank", None):
        return True
    return any(key.endswith("q_proj") and style == "colwise" for key, style in plan.items())


def plan_of(model: PreTrainedModel) -> Mapping[str, str]:
    """The style of each pattern of names. Raises InvalidInput for a model without a plan."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    if not plan:
        got = f"{type(model).__name__}, which has no tp_plan"
        raise InvalidInput("tp", got=got, expected="a model whose weights transformers can split")
    for name, module in model.named_modules():
        if hasattr(module, "kv_b_proj") and not any(
            re.fullmatch(_pattern(key), f"{name}.kv_b_proj") for key in plan
        ):
            children = {last for last, _ in module.named_children()}
            plan |= {f"{name}.{last}": style for last, style in LATENT.items() if last in children}
    return plan


def _matches(model: PreTrainedModel, plan: Mapping[str, str]) -> list[tuple[str, str]]:
    """(name, style) of every module and parameter of the plan. A vision tower stays whole."""
    patterns = [(re.compile(_pattern(key)), style) for key, style in plan.items()]
    tower = tower_of(model)
    whole = set() if tower is None else {*tower.modules(), *tower.parameters()}
    names = [
        *(name for name, module in model.named_modules() if module not in whole),
        *(
            name
            for name, parameter in model.named_parameters(remove_duplicate=False)
            if parameter not in whole
        ),
    ]
    return [
        (name, style) for name in names for pattern, style in patterns if pattern.fullmatch(name)
    ]


def _pattern(key: str) -> str:
    return re.escape(key).replace(r"\*", r"\d+")


def _head_dim(owner: torch.nn.Module, projection: str) -> int | None:
    """Dims of a KV head; None if the owner does not state them, and in other projections."""
    stated = (getattr(owner, name, None) for name in KV.get(projection, ()))
    return next((dim for dim in stated if isinstance(dim, int)), None)


def _split_module(
    module: torch.nn.Module, style: str, joints: Joints, name: str, *, head_dim: int | None
) -> None:
    group = joints.group
    if style in WHOLE:
        return
    if style == EXPERTS:
        joints.before(module)
        joints.after(module)
        return
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor):
        raise InvalidInput(name, got=type(module).__name__, expected="a module with a weight")
    if "col" in style:
        joints.before(module)
    if style == "colwise_gather_output" and weight.shape[0] % group.size:
        return  # whole on each rank, with the same result
    if head_dim is not None and weight.shape[0] % (group.size * head_dim):
        _keep_head(module, weight.shape[0] // head_dim, head_dim, group, name)
        return
    _keep_part(module, style, group, name)
    if style == "colwise_gather_output":
        module.register_forward_hook(_Gather(group))
    elif style == "rowwise_split_input":
        module.register_forward_pre_hook(_TakePart(group))
    if "row" in style:
        joints.after(module)


def _keep_part(module: torch.nn.Module, style: str, group: RankGroup, name: str) -> None:
    module.weight = _part(module.get_parameter("weight"), style, group, f"{name}.weight")
    if isinstance(module, torch.nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    bias = getattr(module, "bias", None)
    if bias is not None and "row" in style:
        # The sum over ranks adds it once
        module.bias = _parameter(bias if group.rank == 0 else torch.zeros_like(bias))
    elif bias is not None:
        module.bias = _part(bias, style, group, f"{name}.bias")


def _part(values: torch.Tensor, style: str, group: RankGroup, name: str) -> torch.nn.Parameter:
    """This rank's part of a weight [..., out, in] or a bias [out]."""
    if style in ("colwise", "colwise_gather_output", "packed_colwise"):
        dim = values.dim() - 2 if values.dim() > 1 else 0
    elif style in ("rowwise", "rowwise_split_input", "packed_rowwise"):
        dim = values.dim() - 1
    else:
        expected = "a style that splits columns or rows, or leaves a weight whole"
        raise InvalidInput(name, got=f"the style {style!r} in tp_plan", expected=expected)
    packed = 2 if style.startswith("packed") else 1
    size = values.shape[dim]
    if size % (packed * group.size):
        expected = f"a multiple of {packed * group.size}, for {group.size} ranks"
        raise InvalidInput(name, got=f"{size} {'rows' if dim else 'outputs'}", expected=expected)
    share = size // packed // group.size
    halves = [half.narrow(dim, group.rank * share, share) for half in values.chunk(packed, dim)]
    return _parameter(torch.cat(halves, dim))


def _keep_head(
    module: torch.nn.Module, heads: int, head_dim: int, group: RankGroup, name: str
) -> None:
    """Keep one KV head, which other ranks keep too."""
    if group.size % heads:
        expected = f"a divisor of {group.size} ranks, or a multiple"
        raise InvalidInput(name, got=f"{heads} KV heads", expected=expected)
    first = group.rank * heads // group.size * head_dim
    for kind in ("weight", "bias"):
        values = getattr(module, kind, None)
        if values is not None:
            setattr(module, kind, _parameter(values[first : first + head_dim]))


def _parameter(values: torch.Tensor) -> torch.nn.Parameter:
    # A copy, so that the whole weight is freed
    return torch.nn.Parameter(values.detach().clone(), requires_grad=False)


class _Sum:
    """A forward hook that adds the results of all ranks."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group

    def __call__(self, module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  # as torch calls it
        return self._group.all_reduce(out.contiguous())


class _Gather(_Sum):
    """A forward hook that puts the columns of all ranks together."""

    def __call__(self, module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:  # noqa: ANN401  # as torch calls it
        return self._group.all_gather(out).movedim(0, -2).flatten(-2)


class _TakePart(_Sum):
    """A forward pre-hook that takes this rank's part of a whole input."""

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> Any:  # type: ignore[override]  # noqa: ANN401  # as torch calls it
        whole = args[0]
        share = whole.shape[-1] // self._group.size
        return (whole.narrow(-1, self._group.rank * share, share), *args[1:])
