"""`attnmux generate`: its options and its help.

Importing this module imports no torch: `run` runs the command.
"""

from __future__ import annotations

import pkgutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Event

import click

from attnmux.core.verbs import FiniteRange, Run, common_options
from attnmux.transformers.cli.early import begin_early
from attnmux.transformers.cli.groups import GroupedCommand
from attnmux.transformers.cli.importing import quick_imports, wake
from attnmux.transformers.cli.prompts import read_prompts
from attnmux.transformers.requests.sampling_params import SamplingParams

AT_LEAST_1 = click.IntRange(min=1)


@click.command(cls=GroupedCommand)
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option(
    "--prompts",
    "file",
    metavar="FILE",
    help="Read more prompts from a file, one per line. A line may be a JSON object with the keys "
    "prompt, images, audio, max_new_tokens, temperature, top_p and seed. - reads stdin.",
)
@click.option(
    "--image",
    "images",
    metavar="FILE",
    multiple=True,
    help="An image that each PROMPT is about; may be given several times. With --chat images come "
    "before the text; else the text has a placeholder for each. Needs "
    "attnmux-transformers[images].",
)
@click.option(
    "--audio",
    metavar="FILE",
    multiple=True,
    help="Sound for a model of speech such as Whisper, in place of a PROMPT: a WAV file of 16-bit "
    "PCM. May be given several times.",
)
@click.option(
    "--decoder-prompt",
    metavar="TEXT",
    help="Text that an encoder-decoder model's answers begin with, such as <|en|><|transcribe|>. "
    "Default: the token that its checkpoint forces, if any.",
)
@click.option(
    "--model", help="A folder, a GGUF file or a Hugging Face hub id. Default: the shipped model."
)
@click.option("--revision", help="A branch, tag or commit of the model on the hub.")
@click.option(
    "--max-new-tokens",
    type=AT_LEAST_1,
    default=128,
    show_default=True,
    help="Limit for each prompt.",
)
@click.option("--temperature", type=float, show_default="0", help="0 decodes greedily.")
@click.option(
    "--top-p",
    type=float,
    show_default="1",
    help="Sample from the likeliest tokens that reach this probability.",
)
@click.option(
    "--logprobs",
    type=click.IntRange(min=0),
    metavar="N",
    help="With --json: the log probability of each token, and those of the N likeliest.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the sampling.")
@click.option("--chat", is_flag=True, help="Apply the model's chat template to each prompt.")
@click.option("--backend", help="The backend for prefill and decode.")
@click.option("--prefill-backend", help="The backend for prefill.")
@click.option("--decode-backend", help="The backend for decode.")
@click.option(
    "--speculative-attention-mode",
    type=click.Choice(["prefill", "decode"]),
    help="Which of the two backends verifies drafts, with --draft. The two of a draft model follow "
    "it too. Default: prefill.",
)
@click.option(
    "--draft-backend",
    metavar="NAME",
    help="The backend of a draft model or an EAGLE head, with --draft. Default: the best for it.",
)
@click.option("--mm-backend", help="The backend for the encoder of images.")
@click.option("--linear-backend", help="The backend for layers without softmax attention.")
@click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="BACKEND.OPTION=VALUE",
    help="An option of a backend; `attnmux backends --json` lists them.",
)
@click.option(
    "--page-size", type=AT_LEAST_1, help="Tokens per KV page. Default: chosen with the backend."
)
@click.option("--kv-dtype", help="Dtype of the KV cache. Default: the model's.")
@click.option(
    "--kv-dtype-skip",
    metavar="LAYERS",
    help="Layers that keep the model's dtype, with --kv-dtype: numbers, ranges and the kinds "
    "sliding_window, attention_chunk and full_attention, such as 0-1,31,sliding_window.",
)
@click.option("--dtype", help="Dtype of the model. Default: the checkpoint's.")
@click.option(
    "--mla",
    type=click.Choice(["absorbed", "expanded"]),
    help="Whether the KV cache of a DeepSeek model holds the latent or the K and V of every head. "
    "Default: absorbed, unless only a last-resort backend serves it.",
)
@click.option(
    "--context",
    type=AT_LEAST_1,
    help="Maximum tokens of a request. Default: the model's limit, or where its longrope switches.",
)
@click.option(
    "--memory",
    help="Size of the KV cache: 2GB, 512MiB, or 80% of the free memory. Default: enough for the "
    "prompts that run at a time.",
)
@click.option(
    "--kept-states",
    type=click.IntRange(min=0),
    help="Prefixes after which the states of linear layers are kept, so that later prompts begin "
    "there. Default: as many as prompts that run at a time.",
)
@click.option(
    "--max-running",
    type=AT_LEAST_1,
    default=64,
    show_default=True,
    help="Maximum prompts that run at a time.",
)
@click.option(
    "--prefill-tokens",
    type=AT_LEAST_1,
    default=8192,
    show_default=True,
    help="Prompt tokens per step. Longer prompts are split into chunks.",
)
@click.option(
    "--draft",
    metavar="ngram|eagle|MODEL",
    help="Guess tokens and verify many in one step. ngram guesses what followed the last tokens "
    "where they occurred before. MODEL, a folder or a hub id, is a smaller model of the same "
    "vocabulary that guesses, or an EAGLE head. eagle is the shipped model's head. "
    "The text stays the same.",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(min=2),
    help="Tokens that a step verifies for each prompt, with --draft. Default: 8, or all guesses of "
    "a draft model if these are fewer.",
)
@click.option(
    "--topk",
    type=AT_LEAST_1,
    default=1,
    show_default=True,
    help="Guesses for each prompt that a step verifies as a tree, with --draft. A draft model "
    "follows so many of its likeliest texts.",
)
@click.option(
    "--steps",
    type=AT_LEAST_1,
    help="Tokens of the longest guess, with --draft. Default: as --draft-tokens allow, and half of "
    "them with --topk above 1.",
)
@click.option(
    "--draft-always",
    is_flag=True,
    help="With --draft, guess in every step. Without it, steps guess while this pays on this "
    "machine, and try again now and then.",
)
@click.option(
    "--accept-threshold-single",
    type=FiniteRange(0, 1, min_open=True),
    default=1.0,
    help="With --draft and --temperature, accept a guess of at least that probability. Below 1 the "
    "text changes.",
)
@click.option(
    "--accept-threshold-acc",
    type=FiniteRange(0, 1, min_open=True),
    default=1.0,
    help="With --draft and --temperature, divide by it the probability with which a guess is "
    "accepted. Below 1 the text changes.",
)
@click.option(
    "--sparse",
    type=click.Choice(["quest"]),
    help="Read only a part of each prompt's keys to decode: the pages whose keys may score highest "
    "(Quest). An approximation: texts may change. Needs --sparse-budget.",
)
@click.option(
    "--sparse-budget",
    type=AT_LEAST_1,
    metavar="TOKENS",
    help="Tokens of each prompt that a step with --sparse reads: whole pages, 4 or more.",
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="Keep each prompt's bits the same, whatever other prompts run at the same time. Slower. "
    "Also the setting deterministic.",
)
@click.option(
    "--graph/--no-graph",
    default=None,
    help="Replay decode steps from device graphs. Default: if device and backend support them.",
)
@click.option(
    "--graph-sizes",
    metavar="B,...",
    help="Batch sizes whose decode steps are captured: 1,2,4,8. Default: the usual ones.",
)
@click.option(
    "--graph-padding/--no-graph-padding",
    default=True,
    help="Pad a step to the next captured size, or run other sizes without graphs.",
)
@click.option(
    "--piece-sizes",
    metavar="T,...",
    help="Numbers of prompt tokens whose steps are captured between attention calls: 64,256,1024, "
    "or none. Default: the usual ones, if device and model support them.",
)
@click.option(
    "--compile",
    is_flag=True,
    help="Compile the model's layers with torch.compile: faster steps, after up to a minute at the "
    "first start.",
)
@click.option(
    "--tp",
    type=AT_LEAST_1,
    help="Split the model over that many devices of this machine (tensor parallel). Under "
    "torchrun: over its processes. Needs attnmux-distributed.",
)
@click.option(
    "--dcp",
    is_flag=True,
    help="With --tp: keep each token's K and V on one device, so that long contexts and latent "
    "attention need less memory on each (decode context parallel).",
)
@click.option(
    "--pcp",
    type=AT_LEAST_1,
    help="Split long prompts over that many devices of this machine, each with the whole model and "
    "all K and V (prefill context parallel). Needs attnmux-distributed.",
)
@click.option(
    "--pcp-min-tokens",
    type=AT_LEAST_1,
    help="New tokens of a prompt from which --pcp splits it. Default: 256 for each device.",
)
@click.option(
    "--dp-attention",
    is_flag=True,
    help="With --tp: give each device prompts of its own, with their attention and KV cache, and "
    "split the other layers (data parallel attention). --max-running, --memory and "
    "--prefill-tokens count for each device.",
)
@click.option("--device", help="A torch device, such as cpu or cuda:1. Default: the accelerator.")
@click.option(
    "--canary",
    type=FiniteRange(0, 1),
    default=0.0,
    metavar="SHARE",
    help="Compare that share of the steps with the reference while they run; 0.01 is cheap, 1 "
    "checks every step. Stops at the first finding. Needs attnmux-testing.",
)
@click.option(
    "--keep-failures",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep a step that fails in attention, for `attnmux replay`. Needs attnmux-testing.",
)
@click.option(
    "--keep-values", is_flag=True, help="Let --keep-failures keep Q, K and V too, not only shapes."
)
@click.option("--no-stream", is_flag=True, help="Print each text once it is complete.")
@common_options
def generate(
    run: Run,
    /,
    prompts: tuple[str, ...],
    file: str | None,
    images: tuple[str, ...],
    audio: tuple[str, ...],
    model: str | None,
    temperature: float | None,
    top_p: float | None,
    seed: int,
    logprobs: int | None,
    **options: object,
) -> None:
    """Continue each PROMPT with the shipped model or with any Hugging Face decoder model, or answer
    it with an encoder-decoder model.

    PROMPT "-" reads stdin. Without a prompt, the shipped model answers a random question.
    Text goes to stdout; the chosen backend, progress and speed go to stderr.
    """
    sampling = SamplingParams(
        temperature=0.0 if temperature is None else temperature,
        top_p=1.0 if top_p is None else top_p,
        seed=seed,
        logprobs=logprobs,
    )
    settings = run.settings()
    user_prompts = read_prompts(prompts, file, model=model, seed=seed, images=images, audio=audio)
    # By name: the import takes seconds, and a user's mistake should not wait for it.
    stated = {"model": model, "states_sampling": (temperature, top_p) != (None, None)}
    splits = any(options[name] not in (None, 1) for name in ("tp", "pcp"))  # ranks have the devices
    has_torch = Event()
    early = partial(begin_early, settings, {**options, "model": model}, partial(wake, has_torch))
    with nullcontext() if splits else run.importing(settings, early), quick_imports(has_torch):
        run_command = pkgutil.resolve_name("attnmux.transformers.cli.run:run_command")
    run_command(run, settings, user_prompts, sampling, {**stated, **options})
