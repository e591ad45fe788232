"""Where the time to a first answer of `attnmux generate` goes.

    python -m benchmarks.first_answer [--random 3b | --model FOLDER] [--length 240] [--starts 3]
                                      [--backend NAME] [--before FOLDER] [--without-ahead]

Each start is a process. The first of a way has empty caches of kernels, the others have what it
left. Python's compiled modules are on disk before. Columns are seconds since the process was
started: until modules are imported, the model is opened and its prompt encoded, a backend is
decided, weights are loaded, the backend and its graphs are made, the first token is there, and the
process ends. The last one counts the kernels that Triton makes in the step of the first token: it
compiles or loads them.

`--before` has the sources of another commit: its starts take turns with those of this one.
`--without-ahead` adds starts of this one in which nothing is done while weights load.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
PHASES = ("imported", "opened", "decided", "loaded", "made", "answered")
CHILD = "--child"


def child(began: float, path: str, ahead: bool, arguments: Sequence[str]) -> None:
    """`attnmux generate` with these arguments; it writes when each phase ended to a file.

    began: `time.time()` before the process was started.
    """
    import pkgutil  # noqa: PLC0415  # the child imports little before it counts

    ends: dict[str, float] = {}
    kernels: list[str] = []

    def end(phase: str) -> None:
        ends.setdefault(phase, time.time() - began)

    def around(owner: Any, name: str, before: str = "", after: str = "") -> None:
        real: Callable[..., Any] = getattr(owner, name)

        @wraps(real)
        def watched(*args: Any, **kwargs: Any) -> Any:
            if before:
                end(before)
            result = real(*args, **kwargs)
            if after:
                end(after)
            return result

        setattr(owner, name, watched)

    resolve = pkgutil.resolve_name

    def resolved(name: str) -> Any:
        found = resolve(name)
        if name.endswith(":run_command"):
            watch()
            end("imported")
        return found

    def watch() -> None:
        run = import_module("attnmux.transformers.cli.run")
        around(run, "load_runner", before="opened", after="made")
        load = import_module("attnmux.transformers.load.load_decoder")
        around(load, "load_model", before="decided", after="loaded")
        around(import_module("attnmux.transformers.engine.engine").Engine, "step", after="answered")
        if not ahead:
            import_module("attnmux.transformers.load.ahead").Ahead.begin = lambda _: None
        if "triton" in sys.modules:

            def made(*, fn: Any, **_: Any) -> None:
                if "made" in ends and "answered" not in ends:
                    kernels.append(fn.name)

            sys.modules["triton"].knobs.runtime.jit_post_compile_hook = made

    pkgutil.resolve_name = resolved  # type: ignore[assignment]  # counts
    sys.argv = ["attnmux", "generate", *arguments]
    try:
        import_module("attnmux.core.cli").main()
    finally:
        Path(path).write_text(json.dumps({"ends": ends, "kernels": kernels}))


def sources(folder: Path) -> str:
    """PYTHONPATH of a checkout."""
    alone = ("core", "parts", "testing", "advisories", "distributed")
    several = [path for kind in ("plugins", "integrations") for path in (folder / kind).iterdir()]
    return os.pathsep.join(str(path / "src") for path in (*map(folder.joinpath, alone), *several))


def start(
    arguments: Sequence[str], environment: Mapping[str, str], scratch: Path, *, ahead: bool
) -> dict[str, Any]:
    """One start. Raises CalledProcessError with what it printed if it fails."""
    told = scratch / "told.json"
    began = time.time()
    words = [sys.executable, __file__, CHILD, str(began), str(told), str(int(ahead)), *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    ended = time.time() - began
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
    done.check_returncode()
    found = json.loads(told.read_text())
    return {**found["ends"], "ended": ended, "kernels": len(found["kernels"])}


def make_model(shape: str, folder: Path) -> None:
    """A random Llama with the tokenizer of the shipped model, whose tokens are bytes."""
    import torch  # noqa: PLC0415  # a start would count it
    from benchmarks.engine import RANDOM  # noqa: PLC0415  # as above
    from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: PLC0415  # as above

    from attnmux.transformers import recall  # noqa: PLC0415  # as above

    layers, hidden, intermediate, heads, kv_heads = RANDOM[shape]
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=8192,
    )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    with torch.device(device or "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(recall.PATH / name, folder)


def main(given: Sequence[str]) -> None:
    import click  # noqa: PLC0415  # as above

    @click.command(context_settings={"show_default": True})
    @click.option("--random", "shape", type=click.Choice(["tiny", "3b"]), help="A random Llama.")
    @click.option("--model", type=click.Path(exists=True, file_okay=False))
    @click.option("--length", type=click.IntRange(min=1), default=240, help="Tokens of the prompt.")
    @click.option("--starts", type=click.IntRange(min=1), default=3)
    @click.option("--backend", default=None)
    @click.option("--before", type=click.Path(exists=True, file_okay=False, path_type=Path))
    @click.option("--without-ahead", is_flag=True)
    def command(**options: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="attnmux-first-") as name:
            measure(Path(name), **options)

    command(list(given))


def measure(
    scratch: Path,
    *,
    shape: str | None,
    model: str | None,
    length: int,
    starts: int,
    backend: str | None,
    before: Path | None,
    without_ahead: bool,
) -> None:
    if shape is not None:
        model = str(scratch / "model")
        make_model(shape, Path(model))
    prompts = scratch / "prompts"
    prompts.write_text("k41," * (length // 4) + "k" * (length % 4) + "\n")
    arguments = ["--prompts", str(prompts), "--max-new-tokens", "4", "--no-stream"]
    arguments += ["--model", model] if model else []
    arguments += ["--backend", backend] if backend else []
    ways: dict[str, tuple[Path, bool]] = {"now": (HERE, True)}
    if without_ahead:
        ways["now, nothing ahead"] = HERE, False
    if before is not None:
        ways = {"before": (before.resolve(), True), **ways}
    environments = {}
    for number, (way, (folder, _)) in enumerate(ways.items()):
        caches = {"XDG_CACHE_HOME": "kept", "TRITON_CACHE_DIR": "kernels"}
        environments[way] = {
            **os.environ,
            "PYTHONPATH": sources(folder),
            "PYTHONPYCACHEPREFIX": str(scratch / "modules"),
            **{variable: str(scratch / f"{number}" / part) for variable, part in caches.items()},
        }
        environments[way].pop("PYTHONDONTWRITEBYTECODE", None)
        text = "import attnmux.transformers.cli.run, transformers.models.llama.modeling_llama"
        subprocess.run([sys.executable, "-c", text], env=environments[way], check=True)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    columns = (*PHASES, "ended", "kernels")
    print(f"{'':34s}" + "".join(f"{name:>10s}" for name in columns), flush=True)
    show = partial(_show, columns)
    for number in range(starts):
        for way, (_, ahead) in ways.items():
            taken = start(arguments, environments[way], scratch, ahead=ahead)
            found[way].append(taken)
            show(f"{way}, {'caches full' if number else 'caches empty'}", taken)
    for way, taken in found.items():
        if later := taken[1:]:
            medians = {name: statistics.median(one[name] for one in later) for name in columns}
            show(f"{way}, median of {len(later)} full", medians)


def _show(columns: Sequence[str], title: str, values: Mapping[str, float]) -> None:
    cells = (f"{values[name]:10.2f}" for name in columns[:-1])
    print(f"{title:34s}" + "".join(cells) + f"{values['kernels']:10.0f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        _, _, since, place, does_ahead, *rest = sys.argv
        child(float(since), place, does_ahead == "1", rest)
    else:
        main(sys.argv[1:])
