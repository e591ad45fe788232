"""From a decision to a backend."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch

from attnmux.core import (
    AttentionBackend,
    AttnmuxError,
    BackendContext,
    BackendFailed,
    Decision,
    FrozenMapping,
    InvalidInput,
    Offer,
    Plugins,
    build,
    foreign_pool,
    solve,
)
from attnmux.core.composites.dispatch import HybridAttnBackend
from attnmux.core.find.devices import Detection
from attnmux.core.plugin import one_of
from attnmux.testing import Case, FakeBackend, decode, extend, fake_card, fake_platform, make_setup

CASE = Case(name="build", steps=(extend((0, 5)), decode(6)))


class OtherBackend(FakeBackend):
    """A second backend, to tell the halves of a hybrid apart."""


def context_of(case: Case) -> BackendContext:
    return make_setup(case, fake_platform(), "cpu").context


def decided(case: Case, **cards: dict[str, object]) -> Decision:
    """The decision for a case among fake cards, each with its phases and factory."""
    offers = [
        Offer(
            card=replace(fake_card(phase=one_of(*fields["phases"])), name=name, **fields["card"]),
            plugin="fakes",
        )
        for name, fields in cards.items()
    ]
    return solve(case.request, fake_platform(), offers)


def factory_of(name: str) -> dict[str, object]:
    return {"factory": f"{__name__}:{name}"}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Let the cards' factories name this module."""
    monkeypatch.setitem(sys.modules, __name__, request.module)


def test_one_backend_for_all_phases_is_a_leaf() -> None:
    decision = decided(CASE, one={"phases": ("extend", "decode"), "card": {}})
    backend = build(decision, context_of(CASE))
    assert type(backend) is FakeBackend


def test_different_backends_make_a_hybrid() -> None:
    decision = decided(
        CASE,
        prefill={"phases": ("extend",), "card": {}},
        decode={"phases": ("decode",), "card": factory_of("OtherBackend")},
    )
    context = context_of(CASE)
    backend = build(decision, context)
    assert isinstance(backend, HybridAttnBackend)
    assert type(backend.prefill) is FakeBackend
    assert type(backend.decode) is OtherBackend
    assert backend.context is context


def test_strided_keys_have_to_be_asked_for() -> None:
    decision = decided(CASE, one={"phases": ("extend", "decode"), "card": {}})
    context = context_of(CASE)
    pool = context.token_to_kv_pool
    side_by_side = {
        layer_id: torch.cat(pool.get_kv_buffer(layer_id), -1).split(pool.head_dim, -1)
        for layer_id in pool.layer_ids
    }
    strided = foreign_pool(side_by_side, page_size=pool.page_size)
    with pytest.raises(InvalidInput, match="choose again with strided_kv set"):
        build(decision, replace(context, token_to_kv_pool=strided))
    request = CASE.request.replace(strided_kv=True)
    offers = [Offer(card=fake_card(phase=one_of("extend", "decode")), plugin="fakes")]
    again = solve(request, fake_platform(), offers)
    asked = replace(context, token_to_kv_pool=strided, request=again.request)
    assert type(build(again, asked)) is FakeBackend


def test_a_context_of_another_request() -> None:
    """Backends read it: whether results are deterministic, say."""
    decision = decided(CASE, one={"phases": ("extend", "decode"), "card": {}})
    context = context_of(replace(CASE, deterministic=True, logit_cap=3.0))
    plain = replace(context, layers=context_of(CASE).layers)
    said = "deterministic True, not False"
    with pytest.raises(InvalidInput, match=f"context.request: .* the decision's request, .*{said}"):
        build(decision, plain)


@pytest.mark.parametrize(
    "factory", ["no.such.module:Backend", "attnmux.core.contract.batch:Nothing"]
)
def test_a_backend_that_cannot_be_imported(factory: str) -> None:
    decision = decided(CASE, one={"phases": ("extend", "decode"), "card": {"factory": factory}})
    with pytest.raises(BackendFailed, match=f"fakes/one cannot run here: {factory}: .*Error"):
        build(decision, context_of(CASE))


def does_not_compile(context: BackendContext, options: object) -> object:
    raise RuntimeError("\nninja failed\nand a page of output")


def says_what_to_do(context: BackendContext, options: object) -> object:
    raise BackendFailed("some/name", "no nvcc", hint="install the CUDA toolkit")


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("does_not_compile", "fakes/one cannot run here: .*: RuntimeError: ninja failed$"),
        ("says_what_to_do", "fakes/one cannot run here: no nvcc; install the CUDA toolkit$"),
    ],
)
def test_a_backend_whose_kernels_do_not_compile(factory: str, said: str) -> None:
    decision = decided(CASE, one={"phases": ("extend", "decode"), "card": factory_of(factory)})
    with pytest.raises(BackendFailed, match=said):
        build(decision, context_of(CASE))


def refuses_its_input(context: BackendContext, options: object) -> object:
    raise InvalidInput("options", got="x", expected="y")


def test_bad_input_is_no_failure_of_the_machine() -> None:
    card = factory_of("refuses_its_input")
    decision = decided(CASE, one={"phases": ("extend", "decode"), "card": card})
    with pytest.raises(InvalidInput, match="options"):
        build(decision, context_of(CASE))


def not_a_backend(context: BackendContext, options: object) -> object:
    return object()


def test_a_factory_that_makes_something_else() -> None:
    card = factory_of("not_a_backend")
    decision = decided(CASE, one={"phases": ("extend", "decode"), "card": card})
    with pytest.raises(AttnmuxError, match="made a object"):
        build(decision, context_of(CASE))


def test_a_pool_of_another_page_size() -> None:
    decision = decided(
        replace(CASE, page_size=16), one={"phases": ("extend", "decode"), "card": {}}
    )
    with pytest.raises(InvalidInput, match=r"expected the decision's page size, 16"):
        build(decision, context_of(CASE))


def test_a_pool_of_another_dtype() -> None:
    decision = decided(
        replace(CASE, kv_dtype="float16"), one={"phases": ("extend", "decode"), "card": {}}
    )
    with pytest.raises(InvalidInput, match=r"the decision's KV dtype, float16, got bfloat16"):
        build(decision, context_of(CASE))


LATENT = {"kind": "mla", "num_kv_heads": 1, "kv_lora_rank": 32, "qk_rope_head_dim": 8}


@pytest.mark.parametrize(
    ("asked", "changes", "named"),
    [
        ({}, {"head_dim": 64}, "head_dim 64"),
        ({}, {"v_head_dim": 64}, "v_head_dim 64"),
        (LATENT, {"kv_lora_rank": 16}, "kv_lora_rank 16"),
        (LATENT, {"qk_rope_head_dim": 16}, "qk_rope_head_dim 16"),
        ({}, LATENT, "kind=mla"),
        ({}, {"kind": "dual_chunk", "dual_chunk_len": 16}, "kind=dual_chunk"),
    ],
)
def test_layers_that_the_decision_was_not_made_for(
    asked: dict[str, object], changes: dict[str, object], named: str
) -> None:
    case = replace(CASE, **asked)
    decision = decided(case, one={"phases": ("extend", "decode"), "card": {}})
    assert isinstance(build(decision, context_of(case)), AttentionBackend)
    with pytest.raises(InvalidInput, match=named):
        build(decision, context_of(replace(case, **changes)))


@pytest.mark.parametrize(
    ("feature", "changes"),
    [
        ("sliding_window", {"windows": (8, None)}),
        ("attention_chunk", {"attention_chunk": 16}),
        ("sinks", {"sinks": True}),
        ("alibi", {"alibi": True}),
        ("relative_bias", {"relative_reach": 8}),
        ("logit_cap", {"logit_cap": 30.0}),
    ],
)
def test_a_layer_with_a_feature_that_was_not_asked_for(
    feature: str, changes: dict[str, object]
) -> None:
    decision = decided(CASE, one={"phases": ("extend", "decode"), "card": {}})
    with pytest.raises(InvalidInput, match=feature):
        build(decision, context_of(replace(CASE, **changes)))
    asked = replace(CASE, **changes)
    decision = decided(asked, one={"phases": ("extend", "decode"), "card": {}})
    assert isinstance(build(decision, context_of(asked)), AttentionBackend)


def test_an_encoders_layers_get_the_backend_of_their_phase() -> None:
    case = replace(CASE, steps=(extend((0, 5)),), is_encoder=True, save_kv_cache=False)
    decision = decided(
        replace(case, is_encoder=False),
        one={"phases": ("extend", "decode"), "card": {}},
    )
    with pytest.raises(InvalidInput, match="expected encoder"):
        build(decision, context_of(case))
    decision = decided(
        case,
        one={"phases": ("extend", "decode"), "card": {}},
        other={"phases": ("encoder",), "card": factory_of("OtherBackend")},
    )
    assert type(build(decision, context_of(case))) is OtherBackend
    with pytest.raises(InvalidInput, match="encoder_head_dim 64"):
        build(decision, context_of(replace(case, head_dim=64)))


def test_an_encoders_and_a_decoders_layers_together() -> None:
    decision = decided(CASE, one={"phases": ("extend", "decode"), "card": {}})
    context = context_of(CASE)
    mixed = (context.layers[0], replace(context.layers[1], is_causal=False))
    with pytest.raises(InvalidInput, match="a backend of its own"):
        build(decision, replace(context, layers=mixed))


def test_a_decision_without_extend_or_decode() -> None:
    decision = decided(CASE, one={"phases": ("extend", "decode"), "card": {}})
    with pytest.raises(InvalidInput, match="extend or decode"):
        build(replace(decision, phases={}), context_of(CASE))


FORGED = "unimportable_module:factory"


@pytest.mark.parametrize("said", [None, True, False, "yes"])
@pytest.mark.parametrize("phases", [("extend", "decode"), ("decode",)])
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_decision_from_text_is_checked_first(monkeypatch, said, phases, is_asked) -> None:
    """Text can name any code, and its hash proves nothing about where it comes from."""
    card = fake_card(phase=one_of("extend", "decode"))
    offers = [Offer(card=card, plugin="fakes")]
    monkeypatch.setattr(Plugins, "load", lambda **_: Plugins())
    monkeypatch.setattr(Plugins, "offers", lambda _: offers)
    monkeypatch.setattr(Plugins, "detect", lambda _: Detection(platforms=(fake_platform(),)))
    honest = solve(CASE.request, fake_platform(), offers)
    changed = {
        phase: replace(choice, factory=FORGED) if phase in phases else choice
        for phase, choice in honest.phases.items()
    }
    # A phase that the request does not ask for is built too
    request = honest.request if is_asked else honest.request.replace(phases=("extend",))
    forged = replace(honest, phases=FrozenMapping(changed), request=request)
    data = forged.to_dict()
    if said is not None:
        data["is_checked"] = said
    loaded = Decision.from_json(json.dumps(data))
    assert not loaded.is_checked
    with pytest.raises(InvalidInput, match=f"factory {card.factory} here, {FORGED} in the decis"):
        build(loaded, context_of(CASE))
    read = Decision.from_json(honest.to_json())
    assert type(build(read, context_of(CASE))) is FakeBackend
    assert read.is_checked
    offers.clear()
    with pytest.raises(InvalidInput, match="offered by no plugin here"):
        build(Decision.from_json(honest.to_json()), context_of(CASE))
