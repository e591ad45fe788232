"""`attnmux lock`: lock the plugins and libraries that decisions may use."""

from __future__ import annotations

import re
from pathlib import Path

import click

from attnmux.core.cli.run import Run, common_options, pass_run, writing
from attnmux.core.facts.errors import InvalidInput
from attnmux.core.find.lock import Lock, content_hash


@click.command()
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("attnmux.lock"),
    show_default=True,
    help="The file to write.",
)
@click.option(
    "--model",
    metavar="NAME@COMMIT|FOLDER",
    help="The only model to generate with: a commit on the hub, or a folder as it is now.",
)
@common_options
@pass_run
def lock(run: Run, output: Path, model: str | None, as_json: bool) -> None:
    """Write the name, version and hash of core, the plugins and their installed libraries.

    `--locked FILE`, or ATTNMUX_LOCKED=FILE, then refuses every other plugin and library, and
    `attnmux generate` every other model where one was named.
    """
    kept = {} if model is None else _kept(run, model)
    made = Lock.of(run.plugins(run.settings()).offers(), kept)
    with writing(output, otherwise="name another with --output"):
        made.write(output)
    unhashed = sorted(name for name, (_, record) in made.distributions.items() if not record)
    if unhashed:
        run.warn(f"no list of installed files, so only the version is kept: {', '.join(unhashed)}")
    if as_json:
        run.echo_json({"file": str(output), "distributions": len(made.distributions)})
    else:
        count = len(made.distributions)
        click.echo(f"{output}: {count} distribution{'s' * (count != 1)}")


def _kept(run: Run, model: str) -> dict[str, str]:
    folder = Path(model).expanduser()
    if folder.is_dir():
        return {"name": model, "revision": content_hash(folder)}
    name, _, revision = model.rpartition("@")
    if not (name and revision):
        expected = "NAME@COMMIT of a model on the hub, or a folder"
        raise InvalidInput("--model", got=repr(model), expected=expected)
    if not re.fullmatch("[0-9a-f]{40}", revision):
        run.warn(
            f"{revision} may be a branch or tag of {name}, which can move; a whole commit cannot"
        )
    return {"name": name, "revision": revision}
