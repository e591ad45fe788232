"""Where the time to a first answer of `attnmux generate` goes.

    python -m benchmarks.first_answer [--random 3b | --model FOLDER] [--length 240] [--starts 3]
                                      [--backend NAME] [--before FOLDER] [--without-ahead]

Each start is a process. The first of a way has empty caches of kernels, the others have what it
left. Python's compiled modules are on disk before. Columns are seconds since the process was
started: until modules are imported, the model is opened and its prompt encoded, a backend is
decided, weights are loaded, the backend and its graphs are made, the first token is there, and the
process ends. `cpu` has the CPU seconds of the process and its children. `kernels` counts those that
Triton makes in the step of the first token: it compiles or loads them.

`--before` has the sources of another commit: its starts take turns with those of this one.
`--without-ahead` adds starts of this one in which nothing is done while weights load.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import torch
from benchmarks.engine import RANDOM, random_config
from benchmarks.one_start import PHASES
from transformers import AutoModelForCausalLM

from attnmux.transformers import recall

ROOT = Path(__file__).resolve().parent.parent
START = Path(__file__).with_name("one_start.py")
MODULES = "import attnmux.transformers.cli.run, transformers.models.llama.modeling_llama"
"""Compiles them, for all starts."""
COLUMNS = (*PHASES, "ended", "cpu", "kernels")


def sources(folder: Path) -> str:
    """PYTHONPATH with a checkout before what it has."""
    alone = ("core", "parts", "testing", "advisories", "distributed")
    several = [path for kind in ("plugins", "integrations") for path in (folder / kind).iterdir()]
    own = [str(path / "src") for path in (*map(folder.joinpath, alone), *several)]
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])


def start(
    arguments: Sequence[str], environment: Mapping[str, str], scratch: Path, *, ahead: bool
) -> dict[str, float]:
    """One start. Raises CalledProcessError with what it printed if it fails."""
    told = scratch / "told.json"
    began = time.time()
    # -P: the folder of the benchmarks hides no module
    words = [sys.executable, "-P", str(START), str(began), str(told), str(int(ahead)), *arguments]
    spent = cpu_seconds()
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    ended, spent = time.time() - began, cpu_seconds() - spent
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
    done.check_returncode()
    found = json.loads(told.read_text())
    return {**found["ends"], "ended": ended, "cpu": spent, "kernels": len(found["kernels"])}


def cpu_seconds() -> float:
    """CPU seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def make_model(shape: str, folder: Path) -> None:
    """A random Llama with the tokenizer of the shipped model, whose tokens are bytes."""
    config = random_config(shape, vocab_size=4096, max_position_embeddings=8192)
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    with torch.device(device or "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]  # transformers' own
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(recall.PATH / name, folder)


@click.command(context_settings={"show_default": True})
@click.option("--random", "shape", type=click.Choice([*RANDOM]), help="A random Llama.")
@click.option("--model", type=click.Path(exists=True, file_okay=False))
@click.option("--length", type=click.IntRange(min=1), default=240, help="Tokens of the prompt.")
@click.option("--starts", type=click.IntRange(min=1), default=3)
@click.option("--backend", default=None)
@click.option("--before", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--without-ahead", is_flag=True)
def main(
    shape: str | None,
    model: str | None,
    length: int,
    starts: int,
    backend: str | None,
    before: Path | None,
    without_ahead: bool,
) -> None:
    """Print when each phase of each start ends."""
    ways: dict[str, tuple[Path, bool]] = {"now": (ROOT, True)}
    if without_ahead:
        ways["now, nothing ahead"] = ROOT, False
    if before is not None:
        ways = {"before": (before.resolve(), True), **ways}
    with tempfile.TemporaryDirectory(prefix="attnmux-first-") as name:
        scratch = Path(name)
        if shape is not None:
            model = str(scratch / "model")
            make_model(shape, Path(model))
        prompts = scratch / "prompts"
        prompts.write_text("k41," * (length // 4) + "k" * (length % 4) + "\n")
        arguments = ["--prompts", str(prompts), "--max-new-tokens", "4", "--no-stream"]
        arguments += ["--model", model] if model else []
        arguments += ["--backend", backend] if backend else []
        measure(arguments, ways, starts, scratch)


def measure(
    arguments: Sequence[str], ways: Mapping[str, tuple[Path, bool]], starts: int, scratch: Path
) -> None:
    """ways: the sources, and whether anything is done ahead."""
    environments = {
        way: environment(folder, scratch, f"{number}")
        for number, (way, (folder, _)) in enumerate(ways.items())
    }
    for each in environments.values():
        subprocess.run([sys.executable, "-c", MODULES], env=each, check=True)
    print(f"{'':34s}" + "".join(f"{name:>10s}" for name in COLUMNS), flush=True)
    found: dict[str, list[Mapping[str, float]]] = {way: [] for way in ways}
    for number in range(starts):
        for way, (_, ahead) in ways.items():
            found[way].append(start(arguments, environments[way], scratch, ahead=ahead))
            show(f"{way}, caches {'full' if number else 'empty'}", found[way][-1])
    for way, taken in found.items():
        if later := taken[1:]:
            medians = {name: statistics.median(one[name] for one in later) for name in COLUMNS}
            show(f"{way}, median of {len(later)} full", medians)


def environment(folder: Path, scratch: Path, name: str) -> dict[str, str]:
    """The variables of starts with these sources and with caches of their own."""
    given = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {
        **given,
        "PYTHONPATH": sources(folder),
        "PYTHONPYCACHEPREFIX": str(scratch / "modules"),
        "XDG_CACHE_HOME": str(scratch / name / "kept"),
        "TRITON_CACHE_DIR": str(scratch / name / "kernels"),
    }


def show(title: str, values: Mapping[str, float]) -> None:
    cells = (f"{values[name]:10.2f}" for name in COLUMNS[:-1])
    print(f"{title:34s}" + "".join(cells) + f"{values['kernels']:10.0f}", flush=True)


if __name__ == "__main__":
    main()
