"""`attnmux lock`: write down what decisions may use here."""

from __future__ import annotations

from pathlib import Path

import click

from attnmux.core.cli.run import Run, common_options, echo_json, pass_run, writing
from attnmux.core.errors import InvalidInput
from attnmux.core.lock import Lock


@click.command()
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("attnmux.lock"),
    show_default=True,
    help="The file to write.",
)
@click.option("--model", metavar="NAME@REVISION", help="A model, with the revision to keep.")
@common_options
@pass_run
def lock(run: Run, output: Path, model: str | None, as_json: bool) -> None:
    """Write name, version and hash of core, the plugins and their installed libraries.

    `--locked FILE`, or ATTNMUX_LOCKED=FILE, then refuses every other plugin and library.
    """
    kept = {}
    if model is not None:
        name, at, revision = model.rpartition("@")
        if not (name and at and revision):
            raise InvalidInput("--model", got=repr(model), expected="NAME@REVISION")
        kept = {"name": name, "revision": revision}
    made = Lock.of(run.plugins(run.settings()).offers(), kept)
    with writing(output, otherwise="name another with --output"):
        made.write(output)
    unhashed = sorted(name for name, (_, record) in made.distributions.items() if not record)
    if unhashed:
        run.warn(f"no list of installed files, so only the version is kept: {', '.join(unhashed)}")
    if as_json:
        echo_json({"file": str(output), "distributions": len(made.distributions)})
    else:
        click.echo(f"{output}: {len(made.distributions)} distributions")
