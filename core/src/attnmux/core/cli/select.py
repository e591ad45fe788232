"""`attnmux select`: which backend serves a request, on this machine or another, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from attnmux.core.cards.card import BackendCard
from attnmux.core.cards.named import offers_named
from attnmux.core.cards.proof import Proof, Proven
from attnmux.core.choosing.decision import Decision
from attnmux.core.cli.asking import ASSUME, Asked, ask, requested
from attnmux.core.cli.completion import BACKENDS, ENGINES, PLATFORMS
from attnmux.core.cli.run import Run, common_options
from attnmux.core.facts.errors import InvalidInput, NoBackend
from attnmux.core.facts.frozen import defaults, plain
from attnmux.core.facts.libraries import canonical
from attnmux.core.facts.platform import GRAMMAR
from attnmux.core.facts.request import Request, parse_fields
from attnmux.core.find.plugins import Plugins
from attnmux.core.find.settings import Settings, read_assignments

if TYPE_CHECKING:
    from attnmux.core.cli.engines import Engine

PLATFORM = (
    f"A machine, present or not, as {GRAMMAR}; or a vendor on this machine. Several are compared."
)
SKIP = (
    "Layers of --model that keep its dtype, with --request kv_dtype=…: numbers, ranges and the "
    "kinds sliding_window, attention_chunk and full_attention, such as 0-1,31,sliding_window."
)
EVERY = "*"
"""`--explain` without a name."""
SET = "An option of a backend; `attnmux backends --json` lists them."


@click.command()
@click.option("--platform", "platforms", multiple=True, help=PLATFORM, shell_complete=PLATFORMS)
@click.option(
    "--request",
    "fields",
    multiple=True,
    help="FIELD=VALUE,…: page_size=16,spec_topk=4; repeatable.",
)
@click.option(
    "--model", help="A folder with a config.json, an id of the Hugging Face Hub, or a GGUF file."
)
@click.option("--assume", is_flag=True, help=ASSUME)
@click.option("--tp", type=click.IntRange(min=1), default=1, help="Ranks that share the heads.")
@click.option("--kv-dtype-skip", "skip", metavar="LAYERS", help=SKIP)
@click.option("--backend", shell_complete=BACKENDS, help="The backend for extend and decode.")
@click.option("--prefill-backend", shell_complete=BACKENDS, help="The backend for extend.")
@click.option("--decode-backend", shell_complete=BACKENDS, help="The backend for decode.")
@click.option("--mm-backend", shell_complete=BACKENDS, help="The backend for a multimodal encoder.")
@click.option(
    "--linear-backend",
    shell_complete=BACKENDS,
    help="The backend for layers without softmax attention.",
)
@click.option(
    "--speculative-attention-mode",
    type=click.Choice(["prefill", "decode"]),
    help="Which of the two serves verify and draft steps.",
)
@click.option("--set", "assignments", multiple=True, metavar="BACKEND.OPTION=VALUE", help=SET)
@click.option("--without", multiple=True, metavar="DIST", help="Count a library as not installed.")
@click.option("--allow-coercion", is_flag=True, help="Allow changes to values that you set.")
@click.option("--no-measurements", is_flag=True, help="Ignore the measurements of this machine.")
@click.option("--no-shipped-figures", is_flag=True, help="Ignore the figures that plugins carry.")
@click.option(
    "--engine",
    "engine_name",
    metavar="NAME",
    shell_complete=ENGINES,
    help="Make this engine's request, and print its commands: vllm, sglang.",
)
@click.option(
    "--explain",
    is_flag=False,
    flag_value=EVERY,
    metavar="[BACKEND]",
    shell_complete=BACKENDS,
    help="Say why each other backend lost, or why one did, and who set each value.",
)
@click.option("--all", "every", is_flag=True, help="Like --explain, with every reason.")
@common_options
def select(
    run: Run,
    /,
    as_json: bool,
    platforms: tuple[str, ...],
    fields: tuple[str, ...],
    model: str | None,
    assume: bool,
    tp: int,
    skip: str | None,
    speculative_attention_mode: str | None,
    assignments: tuple[str, ...],
    without: tuple[str, ...],
    allow_coercion: bool,
    no_measurements: bool,
    no_shipped_figures: bool,
    engine_name: str | None,
    explain: str | None,
    every: bool,
    **backends: str | None,
) -> None:
    """Choose the backend of each phase, and say why.

    Exits with 0 when decided, 2 for a request that cannot be read, 3 when nothing fits
    (with --engine, in that engine), the model has layers that no backend serves, or its
    model_type is not known.
    """
    asked_mode, warn = speculative_attention_mode, run.warn if assume else None
    request = requested(model, fields, tp, asked_mode, skip=skip, assume=warn)
    in_full = explain is not None or every
    _refuse_several(platforms, in_full=in_full, engine=engine_name)
    settings = run.settings(no_shipped_figures="--no-shipped-figures" * no_shipped_figures)
    if settings.deterministic and not request.deterministic:
        request = request.replace(origin="config", deterministic=True)
    plugins = run.plugins(settings)
    _warn_of_unused_without(run, plugins, without)
    engine = _engine(engine_name, settings, request, model)
    given = {
        **backends,
        "options": read_assignments("--set", assignments),
        "allow_coercion": allow_coercion or None,
        "without": frozenset(without),
    }
    measured = not no_measurements
    # A request keeps no flag that is off
    graphs = "graph" not in parse_fields(*fields)
    ask_machine = partial(
        ask, run, settings, plugins, request, given=given, measured=measured, graphs=graphs
    )
    of_engine = None if engine is None else engine.ask
    queries = [ask_machine(platform, of_engine=of_engine) for platform in platforms or (None,)]
    lines: tuple[str, ...] = ()
    if engine is not None:
        try:
            lines = engine.lines(queries[0], model, tp=tp, skip=skip, measured=measured)
        except NoBackend as refusal:
            queries[0] = queries[0]._replace(answer=refusal)
    data = {**_answered(queries[0]), "warnings": run.warnings}
    data |= dict(zip(("install", "launch"), lines, strict=False))
    if len(queries) > 1:
        _compare(run, queries, as_json=as_json)
    elif as_json and not in_full:
        run.echo_json(data)
    else:
        # Plain JSON is for programs, which should not wait for these imports
        from attnmux.core.cli.select_explained import explained  # noqa: PLC0415

        explanation = explained(queries[0], model=model or "", tp=tp, skip=skip)
        if explain not in (None, EVERY):
            explanation, every = explanation.of(offers_named(explain, queries[0].offers)), True
        if as_json:
            run.echo_json({**data, "explanation": explanation.to_dict()})
        else:
            from attnmux.core.cli.render import render_answer  # noqa: PLC0415  # rich is slow

            render_answer(queries[0], explanation, lines, explain=in_full, every=every)
    _raise_refusals([query.answer for query in queries], in_brief=in_full and not as_json)


def _refuse_several(platforms: Sequence[str], *, in_full: bool, engine: str | None) -> None:
    """Only one machine's answer is explained, or becomes an engine's command line."""
    for option, given_with in (("--explain", in_full), ("--engine", engine)):
        if given_with and len(platforms) > 1:
            got = str(len(platforms))
            raise InvalidInput("--platform", got=got, expected=f"one with {option}")


def _raise_refusals(answers: Iterable[Decision | NoBackend], *, in_brief: bool) -> None:
    """After printing: the first refusal ends the command, and so do layers without a backend.

    in_brief: without the reasons, which a table has shown.
    """
    for answer in answers:
        if isinstance(answer, NoBackend):
            reason = str(answer).partition("\n")[0]
            raise NoBackend(reason, answer.candidates) if in_brief else answer
        if answer.unserved_layers:
            reason = ", ".join(f"{count} of {kind}" for kind, count in answer.unserved_layers)
            reason += answer.unserved_hint
            raise NoBackend(f"no backend serves these layers of the model: {reason}")


def _engine(
    name: str | None, settings: Settings, request: Request, model: str | None
) -> Engine | None:
    if name is None:
        return None
    from attnmux.core.cli.engines import check_facts, engine_named  # noqa: PLC0415  # few ask

    engine = engine_named(name, settings)
    check_facts(request, model)
    return engine


def _compare(run: Run, asked: Sequence[Asked], *, as_json: bool) -> None:
    """Print the answers of several machines: one table, or {"machines": […], "warnings": […]}."""
    if as_json:
        run.echo_json({"machines": list(map(_answered, asked)), "warnings": run.warnings})
        return
    from attnmux.core.cli.render import render_machines  # noqa: PLC0415  # rich is slow to import

    render_machines(asked)


def _answered(asked: Asked) -> dict[str, Any]:
    """The decision as JSON, with the proof of each backend on the machine, in the requested phases
    that it serves. A refusal has the same keys, with nothing decided."""
    request, device, answer = asked.request, asked.device, asked.answer

    def proof_of(card: BackendCard) -> Proof:
        served = [
            phase
            for phase in request.phases
            if any(clause.phase.admits(phase) for clause in card.clauses)
        ]
        return Proven.on(card.verified_on, device, served, request.kind).word

    proof = {offer.address: proof_of(offer.card) for offer in asked.offers}
    if not isinstance(answer, NoBackend):
        return {**answer.to_dict(), "proof": proof}
    undecided = {name: plain(value) for name, value in defaults(Decision).items()}
    del undecided["is_checked"]
    return {
        "platform": device.to_dict(),
        "request": request.to_dict(),
        "page_size": request.page_size,
        "kv_dtype": request.kv_dtype,
        "hash": None,
        "phases": {},
        **undecided,
        "parts": {},
        "candidates": plain(answer.candidates),
        "proof": proof,
    }


def _warn_of_unused_without(run: Run, plugins: Plugins, without: Iterable[str]) -> None:
    """A library that no backend requires changes no answer; its name may be misspelt."""
    offers = plugins.offers() if without else ()
    required = {canonical(name) for offer in offers for name in offer.card.libraries()}
    for name in without:
        if canonical(name) not in required:
            run.warn(f"--without {name}: no backend requires it (deny_plugins leaves a plugin out)")
