"""Cases of the conformance suite on a group of ranks that interleave their KV."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from attnmux.core import NoBackend, Offer, Platform, Policy, Reason, Request
from attnmux.distributed import HeadSplit, InterleavedDecision, decide_interleaved
from attnmux.emulators.whole_heads import copies_of, viewed
from attnmux.testing import Candidate, Case, Outcome, run_case


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Decided(Candidate):
    """A candidate that the solver has chosen for the case already, over the ranks."""

    def refusals(self, request: Request, platform: Platform | None = None) -> tuple[Reason, ...]:
        return ()


def run_on_ranks(
    found: Candidate,
    portable: Candidate,
    case: Case,
    heads: HeadSplit,
    *,
    interleave: int = 1,
    chunk_bytes: int = 1 << 29,
    seed: int = 0,
) -> Outcome:
    """Run a case with `found` on each rank, if the solver takes it to decode over all of them.

    portable: attends to the parts of prompts that `found` does not serve. Every rank calls it with
    the same case. Otherwise the outcome is "refused", with the solver's reasons. Its page size is
    that of all ranks together.
    """
    try:
        decision = decided(found, portable, case, heads.group.size, interleave=interleave)
    except NoBackend as refused:
        own = (each for each in refused.candidates if each.backend == found.card.name)
        reasons = tuple(reason for verdict in own for reason in verdict.reasons)
        return Outcome(case=case.name, status="refused", reasons=reasons)
    of_prompts = decision.prompts.request
    if case.kind == "mla":  # whose expanded heads are the latent itself here
        rank = case.kv_lora_rank or 0
        width = rank + (case.qk_rope_head_dim or 0)
        of_prompts = of_prompts.replace(head_dim=width, v_head_dim=rank)
    serves = not found.refusals(of_prompts)
    make = partial(
        viewed,
        heads=heads,
        candidate=found,
        prompts=found if serves else portable,
        interleave=interleave,
        chunk_bytes=chunk_bytes,
    )
    candidate = _Decided(
        card=found.card,
        platform=found.platform,
        plugin=found.plugin,
        device=found.device,
        factory=make,
        launches=found.launches,
    )
    return run_case(candidate, case, seed=seed)


def decided(
    found: Candidate, portable: Candidate, case: Case, size: int, *, interleave: int = 1
) -> InterleavedDecision:
    """The decision for a case with `found` named to decode. Raises as `decide_interleaved` does."""
    copies = copies_of(case, size)
    latent = case.kind == "mla"
    request = case.request.replace(
        num_q_heads=case.num_q_heads // size,
        num_kv_heads=1 if latent else case.num_kv_heads * copies // size,
        page_size=case.page_size // size,
    )
    return decide_interleaved(
        request,
        found.platform,
        [
            *{
                each.address: Offer(card=each.card, plugin=each.plugin)
                for each in (portable, found)
            }.values()
        ],
        Policy(
            decode_backend=found.address,
            prefer=(found.address,),
            options={found.address: found.options},
        ),
        size=size,
        kv_copies=size if latent else copies,
        interleave=interleave,
    )
