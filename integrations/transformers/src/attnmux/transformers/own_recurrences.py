"""Recurrences of models that compute them in their own code, led to the mixer.

An adapter makes a module's forward: it projects as the module does, and asks the mixer for the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from attnmux.core import InvalidInput
from attnmux.transformers.mixer_calls import ACTIVATIONS, Convolution, Recurrence, row_of

if TYPE_CHECKING:
    from attnmux.transformers.mixers import Mixer


def _lightning(mixer: Mixer) -> Callable[..., Any]:
    """MiniMax's: a head's state decays by the same factor at every token."""
    module: Any = mixer.module
    heads, dim = module.num_attention_heads, module.head_dim

    def forward(
        hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: object
    ) -> tuple[torch.Tensor, None]:
        _refuse_padding(mixer, attention_mask)
        qkv = module.act_fn(module.qkv_proj(row_of(mixer, hidden_states)))
        q, k, v = qkv.view(-1, heads, 3 * dim).split(dim, dim=2)
        asked = Recurrence(
            kind="lightning",
            q=q.contiguous(),
            k=k.contiguous(),
            v=v.contiguous(),
            g=-module.slope_rate.view(heads).float().expand(q.shape[0], -1),
            beta=None,
            scaling=1.0,
            qk_l2norm=False,
        )
        out = module.norm(mixer.recur(asked).flatten(1).unsqueeze(0))
        return module.out_proj(module.output_gate(hidden_states).sigmoid() * out), None

    return forward


def _zamba(mixer: Mixer) -> Callable[..., Any]:
    """Mamba in several heads, each of which the module scans by itself."""
    module: Any = mixer.module
    heads, states = module.n_mamba_heads, module.ssm_state_size
    if module.activation not in ACTIVATIONS:
        raise InvalidInput(f"{mixer.name}, activation", got=module.activation, expected="silu")

    def forward(
        hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: object
    ) -> torch.Tensor:
        _refuse_padding(mixer, attention_mask)
        projected = module.in_proj(row_of(mixer, hidden_states))
        x, gate = projected.view(projected.shape[0], -1, 2).unbind(2)
        weight, bias = module.conv1d.weight.squeeze(1), module.conv1d.bias
        x = mixer.convolve(Convolution(x=x.contiguous(), weight=weight, bias=bias, silu=True))
        by_head = x.view(x.shape[0], heads, -1).transpose(0, 1)
        dt, k, q = (by_head @ module.x_proj_weight.mT).split(
            [module.time_step_rank, states, states], dim=-1
        )
        dt = dt @ module.dt_proj_weight.mT + module.dt_proj_bias[:, None]
        dt = torch.nn.functional.softplus(dt).transpose(0, 1).flatten(1).float()
        asked = Recurrence(
            kind="mamba1",
            q=q.transpose(0, 1).contiguous(),
            k=k.transpose(0, 1).contiguous(),
            v=x.unsqueeze(-1),
            g=dt.unsqueeze(-1) * -module.A_log.float().exp().flatten(0, 1),
            beta=dt,
            scaling=1.0,
            qk_l2norm=False,
        )
        out = mixer.recur(asked).squeeze(-1) + x * module.D.flatten()
        return module.out_proj((out * torch.nn.functional.silu(gate)).unsqueeze(0))  # type: ignore[no-any-return]  # a tensor

    return forward


def _refuse_padding(mixer: Mixer, mask: torch.Tensor | None) -> None:
    if mask is not None:
        expected = "none: nothing is padded"
        raise InvalidInput(f"{mixer.name}, attention_mask", got="a mask", expected=expected)


ADAPTERS: Mapping[str, Callable[[Mixer], Callable[..., Any]]] = MappingProxyType(
    {"MiniMaxLightningAttention": _lightning, "ZambaMambaMixer": _zamba}
)
"""By the class of a module."""
