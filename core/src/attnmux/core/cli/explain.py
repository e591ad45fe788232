"""`attnmux explain`: what each reason code means, and what a user can do about it."""

from __future__ import annotations

from collections.abc import Mapping

import click

from attnmux.core.cli.run import Run, common_options, echo_json, pass_run
from attnmux.core.facts.axes import AXES, Axis
from attnmux.core.facts.checks import nearest
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.facts.values import KINDS

MEANINGS: Mapping[str, str] = {
    "CONTRACT": "Its card is written for another version of the contract. Update its plugin or "
    "attnmux-core.",
    "DENIED": "The configuration leaves it out: allow_backends, deny_backends or the lists of "
    "plugins. attnmux select --all shows the origin of each value.",
    "EXCLUDED": "It must not share a KV cache with the backend of the other phase. Name one of the "
    "two for both phases.",
    "FAILED": "It was tried on this machine, and its library did not load or its kernels did not "
    "compile. The reason has the library's own message.",
    "LIBRARY": "A library that it needs is missing, or has another version. The hint is the line "
    "that installs it.",
    "MAX_ERROR": "Neither a measurement nor its card proves that its error stays below max_error. "
    "Measure it: attnmux bench --keep.",
    "NO_CLAUSE": "Its card has no clause, so that it serves nothing.",
    "NO_COMMON_POINT": "It fits by itself, but no page size and KV dtype suit it and a backend for "
    "every other phase. Name backends that share them, or one backend for all phases.",
    "PHASES_TOGETHER": "It serves some of the phases that one backend must serve together, but not "
    "all of them.",
}
"""The codes that do not name an axis."""

AXIS_MEANINGS: Mapping[str, str] = {
    "vendor": "It runs on devices of other vendors.",
    "arch": "It runs on other architectures of this vendor.",
    "version": "It needs another compute capability, such as 9.0 for sm90.",
    "features": "It needs a feature that the device or its host lacks, such as avx2 or a compiler.",
    "runtime": "It needs another version of the device's runtime, such as 12.8.",
    "kind": f"It serves other kinds of attention, of {', '.join(KINDS)}.",
    "phase": "It does not serve this phase: extend, decode, verify, draft or encoder.",
    "num_q_heads": "Its kernels do not serve that number of query heads a rank.",
    "num_kv_heads": "Its kernels do not serve that number of KV heads a rank.",
    "group_size": "Its kernels do not serve that number of query heads per KV head.",
    "head_dim": "Its kernels do not serve that size of a head of Q and K.",
    "v_head_dim": "Its kernels do not serve heads of V of another size than those of K.",
    "kv_lora_rank": "Its kernels do not serve that size of the latent of MLA.",
    "qk_rope_head_dim": "Its kernels do not serve that size of the rotary part of MLA.",
    "sliding_window": "It does not serve sliding windows, or not of that size.",
    "attention_chunk": "It does not serve attention in chunks, or not of that size.",
    "cross_attention": "It does not serve cross attention to an encoder's tokens.",
    "sinks": "It does not serve attention sinks.",
    "alibi": "It does not add a bias by distance to the logits (ALiBi), or not together with the "
    "request's other features.",
    "relative_bias": "It does not add relative position biases to the logits (T5), or not together "
    "with the request's other features.",
    "logit_cap": "It does not serve a soft cap of the logits.",
    "dtype": "Its kernels do not compute in that dtype.",
    "kv_dtype": "Its kernels do not read K and V stored in that dtype.",
    "page_size": "Its kernels do not read KV pages of that size.",
    "spec_topk": "It does not serve draft trees with that many branches a node.",
    "spec_draft_tokens": "It does not verify that many draft tokens a request.",
    "tree_windows": "It does not serve draft trees in layers with windows or attention chunks.",
    "custom_mask": "It does not take a mask of the user or of a draft tree.",
    "multi_item": "It does not score several items after one shared prefix.",
    "deterministic": "Its results may depend on the other requests of the batch.",
    "graph": "Its steps cannot be captured in a device graph.",
    "lse": "It does not return the log-sum-exp of the logits.",
    "strided_kv": "Its kernels do not read a KV cache with gaps between slots or heads.",
}


@click.command()
@click.argument("codes", nargs=-1, metavar="[CODE]...")
@common_options
@pass_run
def explain(_: Run, as_json: bool, codes: tuple[str, ...]) -> None:
    """Explain the codes of `select --json`, and what helps. Without CODE, explain all of them."""
    known = meanings()
    for code in codes:
        if code.upper() not in known:
            near = nearest(code.upper(), known)
            guess = f"a reason code, such as {near}" if near else "a reason code"
            expected = f"{guess} (attnmux explain lists them)"
            raise InvalidInput("CODE", got=repr(code), expected=expected)
    asked = {code.upper(): known[code.upper()] for code in codes} or known
    if as_json:
        echo_json(asked)
        return
    from attnmux.core.cli.render import render_codes  # noqa: PLC0415  # rich is slow to import

    render_codes(asked)


def meanings() -> dict[str, str]:
    """Every code with its explanation, sorted."""
    axes = {axis.name.upper(): f"{AXIS_MEANINGS[axis.name]} {_advice(axis)}" for axis in AXES}
    return dict(sorted({**MEANINGS, **axes}.items()))


def _advice(axis: Axis) -> str:
    name = axis.name
    if axis.settable and axis.droppable:
        return f"Change {name} in --request, or let --allow-coercion drop it."
    if axis.settable:
        return f"Change {name} in --request, or choose another backend."
    return "The model or the machine sets this: choose another backend."
