"""`attnmux warm`: its options. `run_warm` runs it, with torch.

Importing this module imports no torch.
"""

from __future__ import annotations

import pkgutil
from functools import partial
from threading import Event

import click

from attnmux.core.verbs import Run, common_options
from attnmux.transformers.cli.command import generate
from attnmux.transformers.cli.early import begin_early
from attnmux.transformers.cli.importing import quick_imports, wake

SHARED = (
    *("model", "revision", "dtype", "device"),
    *("backend", "prefill_backend", "decode_backend", "assignments", "mla"),
    *("page_size", "kv_dtype", "kv_dtype_skip", "context", "max_running", "deterministic", "graph"),
    *("draft", "draft_tokens", "topk", "steps", "speculative_attention_mode"),
)
"""Options of `generate` that decide which kernels its steps launch."""


@click.command()
@common_options
def warm(run: Run, /, *, as_json: bool, **options: object) -> None:
    """Compile and try ahead what `generate` needs with the same options.

    Reads the model's config.json and no weights. Compiled kernels are kept on disk, those of long
    prompts and drafts too, and so is whether the backend passed its first cases: the first answer
    waits for neither. A draft model is another --model.
    """
    settings = run.settings()
    has_torch = Event()
    early = partial(begin_early, settings, options, partial(wake, has_torch))
    with run.importing(settings, early), quick_imports(has_torch):
        run_warm = pkgutil.resolve_name("attnmux.transformers.cli.run_warm:run_warm")
    run_warm(run, settings, options, as_json=as_json)


warm.params[:0] = [option for option in generate.params if option.name in SHARED]
