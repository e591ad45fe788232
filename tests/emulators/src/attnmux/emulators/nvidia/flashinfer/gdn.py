"""The gated delta rule of flashinfer 0.7.2 on SM90, in plain torch.

What an adapter can notice of the real functions, from flashinfer/gdn_prefill.py, gdn_decode.py,
gdn_kernels/ and data/csrc/gdn_prefill_launcher.cu:

- `chunk_gated_delta_rule`: q, k and v are packed, contiguous, fp16 or bf16, with heads of 128 dims
  (other multiples of 8 below that are untried); g is the decay, at least 1e-10, and beta, float32
  for the most heads. States are float32 [n, H, V, K]. The first ones are only read. Neither q nor k
  is normalised, whatever `use_qk_l2norm_in_kernel` says. What it does for a request without tokens
  is not known: the emulator refuses it.
- `gated_delta_rule_decode`: one token of each request. States are float32 [n, Hv, K, V], and are
  overwritten.
- `gated_delta_rule_mtp`: T tokens of each. States are float32 [n, Hv, V, K], and those after each
  token are written as [n, T, Hv, V, K], without regard to the buffer's own number of tokens.
  Where the argument of softplus exceeds 88 the gate is NaN.
- Both compute g = -exp(A_log) * softplus(a + dt_bias) and beta = sigmoid(b) in float32, and write
  bf16 outputs. Tensors must have the dense strides and 16-byte alignment that the compiled kernel
  assumes. `gated_delta_rule_mtp` copies q and k to registers of bf16: fp16 is refused here.

Products are float32 here. The kernels of prompts round states and values to the dtype of the call
before they multiply them. Decode and drafts read nothing on the host, in static shapes.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from attnmux.emulators.nvidia.flashinfer.arguments import refuse_unusual

DIM = 128
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
L2_EPS = 1e-6
LEAST_DECAY = 1e-10
LARGEST_EXPONENT = 88.0


ONE_VALUE = "Can't deduce the leading dimension from layout"
"""What the CuTe DSL raises for a tensor of several dimensions and one value."""


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None = None,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    output: torch.Tensor | None = None,
    output_state: torch.Tensor | None = None,
    state_checkpoints: torch.Tensor | None = None,
    checkpoint_cu_starts: torch.Tensor | None = None,
    checkpoint_every_n_tokens: int = 0,
    use_cp: object = "auto",
    state_indices: object = None,
    _cp_chunk_len: object = None,
    backend: object = "auto",
    max_seqlen: object = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The output [T, H, 128], and the states afterwards where they are asked for.

    Raises as the library does, and RuntimeError where it would read or write elsewhere.
    """
    refuse_unusual(
        (use_cp, "auto"),
        (state_indices, None),
        (_cp_chunk_len, None),
        (backend, "auto"),
        (max_seqlen, None),
    )
    if state_checkpoints is not None or checkpoint_cu_starts is not None:
        raise NotImplementedError("checkpoints of states")
    assert cu_seqlens is not None, "cu_seqlens is required for varlen mode"
    (total, q_heads, dim), v_heads = q.shape, v.shape[1]
    heads, count = max(q_heads, v_heads), cu_seqlens.shape[0] - 1
    _check(k.shape[1] == (v_heads if q_heads >= v_heads else q_heads), "heads of k")
    _check(heads % min(q_heads, v_heads) == 0, "heads are no multiple")
    _check(dim == DIM == k.shape[2] == v.shape[2], "can_implement failed")
    _check(q.dtype in SIXTEEN_BITS and q.dtype == k.dtype == v.dtype, "dtype of q, k and v")
    out = q.new_empty((total, heads, dim)) if output is None else output
    _check(out.dtype == q.dtype and out.shape == (total, heads, dim), "output")
    states = (count, heads, dim, dim)
    after = q.new_empty(states, dtype=torch.float32) if output_state is None else output_state
    ones = torch.ones((total, heads), dtype=torch.float32, device=q.device)
    decay, beta = (ones if gate is None else gate for gate in (g, beta))
    for name, gate in (("alpha", decay), ("beta", beta)):
        _check(gate.dtype == torch.float32 and gate.shape == (total, heads), name)
    for each in (after, initial_state):
        if each is not None:
            _check(each.dtype == torch.float32 and each.shape == states, "state")
    for tensor in (q, k, v, out, decay, beta, after, initial_state):
        is_loadable = tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0)
        _check(is_loadable, "must be contiguous")
    bounds = cu_seqlens.tolist()
    _check(bounds[0] == 0 and bounds[-1] <= total, "illegal memory access")
    decay = decay.clamp(min=LEAST_DECAY)
    shares = [heads // each.shape[1] for each in (q, k, v)]
    q, k, v = (
        x.float().repeat_interleave(share, 1) for x, share in zip((q, k, v), shares, strict=True)
    )
    for request, (first, last) in enumerate(pairwise(bounds)):
        if first >= last:
            raise NotImplementedError("a request without tokens")
        state = after.new_zeros(states[1:]) if initial_state is None else initial_state[request]
        for token in range(first, last):
            state = _advance(state, k[token], v[token], decay[token], beta[token])
            out[token] = _read(state, q[token], scale or dim**-0.5)
        after[request] = state
    return (out, after) if output_final_state else out


def gated_delta_rule_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: object = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [B, 1, Hv, V], and `state`, which is overwritten.

    Raises as `chunk_gated_delta_rule` does.
    """
    refuse_unusual((backend, "auto"))
    count, tokens, heads, k_dim = q.shape
    assert tokens == 1, f"Decode only supports T=1, got T={tokens}"
    v_heads, v_dim = v.shape[2:]
    _check(count * v_heads > 1, ONE_VALUE)
    expected = (count, v_heads, k_dim, v_dim)
    assert state.shape == expected, f"Expected state shape {expected}, got {state.shape}"
    _check_recurrent(q, k, v, state, A_log, a, dt_bias, b)
    out = _output(v, output)
    decay, beta = _gates(A_log, a, dt_bias, b)
    q, k = (_by_head(each, v_heads // heads, use_qk_l2norm)[:, 0] for each in (q, k))
    held = _advance(state.transpose(-1, -2), k, v[:, 0].float(), decay[:, 0], beta[:, 0])
    out[:, 0] = _read(held, q, k_dim**-0.5 if scale is None else scale).bfloat16()
    state.copy_(held.transpose(-1, -2))
    return out, state


def gated_delta_rule_mtp(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
    scale: float | None = None,
    output: torch.Tensor | None = None,
    intermediate_states_buffer: torch.Tensor | None = None,
    ssm_state_indices: object = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: object = None,
    cache_replayssm: object = False,
    replayssm_rawv: object = None,
    replayssm_rawk: object = None,
    replayssm_g: object = None,
    replayssm_beta: object = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [B, T, Hv, V], and `initial_state`, which is left as it is.

    Raises as `chunk_gated_delta_rule` does.
    """
    refuse_unusual(
        (ssm_state_indices, None),
        (output_state_indices, None),
        (cache_replayssm, False),
        (replayssm_rawv, None),
        (replayssm_rawk, None),
        (replayssm_g, None),
        (replayssm_beta, None),
    )
    if not disable_state_update:
        raise NotImplementedError("the states after all tokens in place of the first")
    count, tokens, heads, k_dim = q.shape
    v_heads, v_dim = v.shape[2:]
    _check(count * tokens > 1, ONE_VALUE)
    assert initial_state.shape == (initial_state.shape[0], v_heads, v_dim, k_dim)
    _check_recurrent(q, k, v, initial_state, A_log, a, dt_bias, b)
    _check(q.dtype == torch.bfloat16, "fp16 is copied to registers of bf16")
    _check(initial_state_indices.dtype == torch.int32, "indices are read as int32")
    after = intermediate_states_buffer
    if after is not None:
        assert after.shape[1] >= tokens
        room = (count, tokens, v_heads, v_dim, k_dim)
        _check(after.shape == room and _is_dense(after), "states would lie elsewhere")
        _check(after.dtype == torch.float32, "a copy would be written")
    out = _output(v, output)
    _check(out.dtype == torch.bfloat16, "the kernel writes bf16")
    decay, beta = _gates(A_log, a, dt_bias, b)
    argument = a.float() + dt_bias.float()
    decay = torch.where(argument > LARGEST_EXPONENT, torch.nan, decay)
    q, k = (_by_head(each, v_heads // heads, use_qk_l2norm) for each in (q, k))
    state = initial_state[initial_state_indices.long()]
    for place in range(tokens):
        state = _advance(state, k[:, place], v[:, place].float(), decay[:, place], beta[:, place])
        if after is not None:
            after[:, place] = state
        read = _read(state, q[:, place], k_dim**-0.5 if scale is None else scale)
        out[:, place] = read.bfloat16()
    return out, initial_state


def _advance(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> torch.Tensor:
    """The states [..., H, V, K] after a token: k [..., H, K], v [..., H, V], gates [..., H]."""
    state = state * decay[..., None, None]
    added = (v - torch.einsum("...vk,...k->...v", state, k)) * beta.unsqueeze(-1)
    return state + added.unsqueeze(-1) * k.unsqueeze(-2)


def _read(state: torch.Tensor, q: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.einsum("...vk,...k->...v", state, q) * scale


def _gates(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The decay and beta [B, T, Hv] float32, with softplus as the kernels compute it."""
    argument = a.float() + dt_bias.float()
    softplus = torch.where(argument <= 20, (1 + argument.exp()).log(), argument)
    return (-A_log.exp() * softplus).exp(), 1 / (1 + (-b.float()).exp())


def _by_head(x: torch.Tensor, group: int, normed: bool) -> torch.Tensor:
    x = x.float()
    if normed:
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
    return x.repeat_interleave(group, dim=2)


def _check_recurrent(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: torch.Tensor,
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    b: torch.Tensor,
) -> None:
    (count, tokens, heads, k_dim), (v_heads, v_dim) = q.shape, v.shape[2:]
    assert k_dim >= DIM, f"K must be at least 128, got K={k_dim}"
    assert v_dim >= DIM, f"V must be at least 128, got V={v_dim}"
    assert v_dim % 32 == 0, f"V must be divisible by 32, got V={v_dim}"
    assert q.dtype in SIXTEEN_BITS, f"q must be float16/bfloat16, got {q.dtype}"
    assert state.dtype == torch.float32, f"state must be float32, got {state.dtype}"
    assert A_log.dtype == torch.float32, f"A_log must be float32, got {A_log.dtype}"
    _check(k_dim == DIM, "only 128 dims of K are read")
    _check(k.shape == q.shape and v_heads % heads == 0, "heads")
    _check(k.dtype == v.dtype == q.dtype, "dtype of k and v")
    for name, gate in (("a", a), ("b", b)):
        _check(gate.shape == (count, tokens, v_heads), name)
        _check(gate.dtype == torch.float32, f"{name}: compiled for float32")
    for gate in (A_log, dt_bias):
        _check(gate.shape == (v_heads,), "gates of a head")
    for tensor in (q, k, v, state, A_log, a, dt_bias, b):
        _check(_is_dense(tensor), "compiled for other strides, or misaligned")


def _output(v: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
    if output is None:
        return torch.zeros(v.shape, dtype=torch.bfloat16, device=v.device)
    _check(output.shape == v.shape and _is_dense(output), "output")
    return output


def _is_dense(tensor: torch.Tensor) -> bool:
    """With the strides of its shape, even in dims of 1, from an aligned address."""
    strides = torch.empty(tensor.shape, device="meta").stride()
    return tensor.stride() == strides and tensor.data_ptr() % 16 == 0


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise RuntimeError(message)
